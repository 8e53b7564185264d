import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OTHER_PYTHON = """#!/bin/sh
case "$1" in
    --version) echo "Python {version}" ;;
    -c) exec {python} -c "import sys; sys.version_info = ({version_info}); $2" ;;
    *) echo called with "$@" >> {calls} ;;
esac
"""


def install(tmp_path: Path, version: str) -> subprocess.CompletedProcess[str]:
    """Runs `make install` with a fake Python of this version, which creates no virtual environment."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    version_info = ", ".join(version.split("."))
    python.write_text(
        OTHER_PYTHON.format(version=version, version_info=version_info, python=shutil.which("python3"), calls=calls)
    )
    python.chmod(0o755)
    command = ["make", "-C", str(ROOT), "install", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("version", ["3.9.6", "3.10.12", "3.15.0", "2.7.18"])
def test_an_unsupported_python_is_refused_before_anything_is_created(tmp_path: Path, version: str) -> None:
    refused = install(tmp_path, version)
    assert refused.returncode == 2
    assert f"is not Python 3.11 to 3.14 (Python {version})" in refused.stderr
    assert "make run PYTHON=" in refused.stderr
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("version", ["3.11.0", "3.14.10"])
def test_a_supported_python_creates_the_virtual_environment(tmp_path: Path, version: str) -> None:
    install(tmp_path, version)
    assert (tmp_path / "calls").read_text() == f"called with -m venv {tmp_path / 'venv'}\n"

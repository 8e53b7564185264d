"""A server in unusual surroundings: working directory, home, standard streams, Python's environment variables."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.demo_questions import ADAPTER_DIR
from tests.support.management import offline_admin_key
from tests.support.server_process import SERVE_FAKE, WAIT_S, environment, run_command, serve_fake, wait_until

POISON = "import os\nos._exit(77)\n"


def test_files_in_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("types", "runpy", "json", "loraserve"):
        (tmp_path / f"{name}.py").write_text(POISON)
    monkeypatch.chdir(tmp_path)
    with serve_fake(tmp_path / "data") as server:
        added = run_command("adapter", "add", "mine", str(ADAPTER_DIR / "spell"), "--url", server.url)
        assert added.returncode == 1
        assert "weights.tensors" in added.stderr, "it was read, and is not one for the fake model"


def test_a_data_directory_may_have_any_name(tmp_path: Path) -> None:
    """Even characters with a meaning in a URL: code that truncates or decodes the name ends up elsewhere."""
    data_dir = tmp_path / "é \n%41?x=1#b"
    offline_admin_key(data_dir)
    with serve_fake(data_dir) as server:
        assert (data_dir / "kv" / "kv.sock").is_socket(), "of a longer path it would be elsewhere"
        link = run_command("ui", "login", "--print", "--data-dir", str(data_dir))
        assert link.stdout.startswith(server.url), link.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_the_server_runs_with_closed_standard_streams(tmp_path: Path, closed: str) -> None:
    uds = tmp_path / "s"
    words = [sys.executable, "-P", str(SERVE_FAKE), "fake", "--uds", str(uds), "--no-certificates"]
    words += ["--data-dir", str(tmp_path / "data")]
    process = subprocess.Popen(["sh", "-c", f'exec "$@" {closed}', "sh", *words], env=environment())
    try:
        wait_until(lambda: is_ready(uds), "it is ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()


def is_ready(uds: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(uds))
            connection.sendall(b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b" 200 " in connection.recv(100)
        except OSError:
            return False


def test_without_a_home_kernels_get_a_folder_and_serve_requires_a_data_directory(tmp_path: Path) -> None:
    without_home = """
import os, sys
from pathlib import Path
for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
    os.environ.pop(name, None)
Path.home = classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")))
Path.expanduser = lambda path: path if str(path)[0] != "~" else Path.home()
from loraserve_kernels.cpu_builds import private_directory
assert private_directory(Path(sys.argv[1])) == Path(sys.argv[1])
private_directory(None).rmdir()
from loraserve.cli.main import main
main(["serve"])
"""
    folder = tmp_path / "kernels"
    started = subprocess.run(
        [sys.executable, "-P", "-c", without_home, str(folder)], env=environment(), capture_output=True, text=True
    )
    assert started.returncode == 2
    assert "give --data-dir, or set HOME" in started.stderr


def test_start_without_a_writable_temporary_folder_fails_and_names_remedies(tmp_path: Path) -> None:
    without_temporary = """
import sys, tempfile
tempfile._candidate_tempdir_list = lambda: ["/nowhere"]
from loraserve.cli.main import main
main(["serve", "--port", "0", "--data-dir", sys.argv[1]])
"""
    started = subprocess.run(
        [sys.executable, "-P", "-c", without_temporary, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert started.returncode == 1
    assert started.stderr.count("\n") == 1
    assert "mount a tmpfs at /tmp, or set TMPDIR" in started.stderr


def test_the_engine_can_import_transformers_under_pythonoptimize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    script = """
import os, subprocess, sys
from loraserve.serving.process.our_modules import python_environment
code = "import transformers.modeling_outputs as m; assert m.BaseModelOutputWithPast.__doc__"
sys.exit(subprocess.run([sys.executable, "-P", "-c", code], env={**os.environ, **python_environment()}).returncode)
"""
    assert subprocess.run([sys.executable, "-P", "-c", script], env=environment()).returncode == 0

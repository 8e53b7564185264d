"""The server without the features that macOS lacks. Never run on a Mac by us: this is as much as can be tested here."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.demo_questions import ADAPTER_DIR, questions, user
from tests.support.management import client
from tests.support.server_process import environment, run_command, serve, wait_until

AS_ON_MACOS = Path(__file__).parents[1] / "support" / "as_on_macos"


@pytest.mark.slow
def test_the_demo_answers_accepts_an_upload_and_leaves_no_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(AS_ON_MACOS))
    without = subprocess.run([sys.executable, "-c", "import os; os.fdatasync"], env=environment(), capture_output=True)
    assert b"AttributeError" in without.stderr, "the patches are there"
    with serve(tmp_path / "data") as server, client(server, "unneeded") as http:
        added = run_command("adapter", "add", "mine", str(ADAPTER_DIR / "uppercase"), "--url", server.url)
        assert added.returncode == 0, added.stdout + added.stderr
        for model, prompt, answer in [*questions(1), ("mine", "hello", "HELLO")]:
            asked = {"model": model, "messages": user(prompt), "temperature": 0, "max_tokens": 60}
            answered = http.post("/v1/chat/completions", json=asked).json()
            assert answered["choices"][0]["message"]["content"] == answer
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 3
        server.signal(signal.SIGKILL)
        wait_until(lambda: not any(map(psutil.Process.is_running, children)), "its processes end with it")

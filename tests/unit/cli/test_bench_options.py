import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from loraserve.cli.loadtest.plan import Distribution, Lengths
from loraserve.cli.loadtest.settings import BenchSettings
from loraserve.cli.main import main


def bench(monkeypatch: pytest.MonkeyPatch, *args: str, code: int = 0) -> list[BenchSettings]:
    ran: list[BenchSettings] = []

    def run_session(settings: BenchSettings) -> int:
        ran.append(settings)
        return 0

    monkeypatch.setitem(sys.modules, "loraserve.cli.loadtest.session", SimpleNamespace(run_session=run_session))
    result = CliRunner().invoke(main, ["bench", *args])
    assert result.exit_code == code, result.output
    return ran


def test_closed_loop_of_16_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    (settings,) = bench(monkeypatch)
    assert settings.running_at_once == 16
    assert settings.workload(["a"]).distribution is Distribution.ROUND_ROBIN


def test_request_rate_opens_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["--request-rate", "2.5", "--distribution", "zipf", "--prompt-tokens", "9", "--prompt-spread", "3"]
    (settings,) = bench(monkeypatch, *args, "--json", "out.json")
    workload = settings.workload(["a", "b"])
    assert settings.running_at_once is None
    assert workload.request_rate == 2.5
    assert workload.distribution is Distribution.ZIPF
    assert workload.prompt_tokens == Lengths(9, 3)
    assert settings.json_file == Path("out.json")


def test_both_loops_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench(monkeypatch, "--request-rate", "1", "--concurrency", "2", code=2) == []


def test_recorded_token_ids_and_chat_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench(monkeypatch, "--requests", __file__, "--chat", code=2) == []

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from loraserve.cli.loadtest.lengths import LognormalLengths, NormalLengths, UniformLengths
from loraserve.cli.loadtest.plan import SharedPrefixes
from loraserve.cli.loadtest.popularity import Distribution
from loraserve.cli.loadtest.server_kind import ServerKind
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


def test_a_closed_loop_of_16_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    (settings,) = bench(monkeypatch)
    assert settings.running_at_once == 16
    assert settings.workload(["a"]).distribution is Distribution.ROUND_ROBIN


def test_a_request_rate_selects_an_open_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["--request-rate", "2.5", "--distribution", "zipf", "--prompt-tokens", "9", "--prompt-spread", "3"]
    (settings,) = bench(monkeypatch, *args, "--json", "out.json")
    workload = settings.workload(["a", "b"])
    assert settings.running_at_once is None
    assert workload.request_rate == 2.5
    assert workload.distribution is Distribution.ZIPF
    assert workload.prompt_tokens == UniformLengths(9, 3)
    assert settings.json_file == Path("out.json")


def test_the_url_is_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench(monkeypatch)[0].url == "http://127.0.0.1:8000"
    assert bench(monkeypatch, "http://there:1/v1")[0].url == "http://there:1/v1"


def test_the_server_kind_is_detected_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench(monkeypatch)[0].server_kind is None
    assert bench(monkeypatch, "--server", "vllm")[0].server_kind is ServerKind.VLLM


def test_a_duration_and_a_rate_determine_the_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    (settings,) = bench(monkeypatch, "--request-rate", "2.5", "--duration", "10")
    assert settings.workload(["a"]).num_requests == 25
    (settings,) = bench(monkeypatch, "--request-rate", "100", "--duration", "0.29")
    assert settings.workload(["a"]).num_requests == 29


def test_sharegpt_lengths_can_be_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    (settings,) = bench(monkeypatch, "--lengths", "sharegpt", "--output-tokens", "40")
    workload = settings.workload(["a"])
    assert workload.prompt_tokens == LognormalLengths(161, 1.2)
    assert workload.output_tokens == LognormalLengths(40, 0.9)


def test_normal_lengths_and_shared_prefixes_reach_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["--lengths", "normal", "--prompt-spread", "200", "--prefixes", "4", "--prefix-tokens", "512"]
    workload = bench(monkeypatch, *args)[0].workload(["a"])
    assert workload.prompt_tokens == NormalLengths(128, 200)
    assert workload.prefixes == SharedPrefixes(4, 512)


def test_other_options_override_the_slora_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    (settings,) = bench(monkeypatch, "--trace", "slora", "--request-rate", "10", "--cv", "4")
    workload = settings.workload(["a"])
    assert workload.distribution is Distribution.POWER
    assert (workload.request_rate, workload.cv, workload.num_requests) == (10.0, 4.0, 3000)
    assert workload.prompt_tokens == workload.output_tokens == UniformLengths(260, 252)


@pytest.mark.parametrize(
    "args",
    [
        ["--duration", "5"],
        ["--duration", "5", "--request-rate", "1", "--num-requests", "3"],
        ["--trace", "slora", "--concurrency", "4"],
        ["--lengths", "sharegpt", "--prompt-spread", "3"],
        ["--prompt-tokens", "8", "--prompt-spread", "8"],
        ["--server", "nobody"],
    ],
)
def test_options_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch, args: list[str]) -> None:
    assert bench(monkeypatch, *args, code=2) == []


def test_request_rate_and_concurrency_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench(monkeypatch, "--request-rate", "1", "--concurrency", "2", code=2) == []


def test_recorded_requests_and_chat_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench(monkeypatch, "--requests", __file__, "--chat", code=2) == []


def test_every_run_has_a_random_seed_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({bench(monkeypatch)[0].seed for _ in range(10)}) > 1
    assert bench(monkeypatch, "--seed", "0")[0].seed == 0


def test_num_requests_overrides_the_slora_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    (settings,) = bench(monkeypatch, "--trace", "slora", "--num-requests", "10")
    assert (settings.request_rate, settings.workload(["a"]).num_requests) == (2.0, 10)


@pytest.mark.parametrize(
    "args",
    [
        ["--num-requests", "5"],
        ["--adapters", "a,b"],
        ["--num-adapters", "1"],
        ["--distribution", "zipf"],
        ["--request-rate", "1", "--duration", "5"],
        ["--prefixes", "1"],
        ["--trace", "slora"],
    ],
)
def test_options_that_recorded_requests_determine_are_refused_with_them(
    monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    assert len(bench(monkeypatch, "--requests", __file__, "--request-rate", "2", "--output-tokens", "4")) == 1
    assert bench(monkeypatch, "--requests", __file__, *args, code=2) == []


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_report_that_cannot_be_written_is_refused_before_the_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    assert bench(monkeypatch, option, str(tmp_path / "none" / "report"), code=2) == []
    assert len(bench(monkeypatch, option, str(tmp_path / "report"))) == 1

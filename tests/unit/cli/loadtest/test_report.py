import io
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from loraserve.cli.failure import Failure
from loraserve.cli.loadtest.client import RequestResult
from loraserve.cli.loadtest.report import report
from loraserve.cli.loadtest.runner import BenchRun
from loraserve.cli.loadtest.tables import print_report


def good(model: str, sent_s: float, ttft_s: float) -> RequestResult:
    return RequestResult(
        model, sent_s, ttft_s=ttft_s, e2e_s=ttft_s + 0.2, gaps_s=[0.1, 0.1], prompt_tokens=2, output_tokens=3
    )


RESULTS = [
    good("a", 2.0, 0.1),
    good("b", 1.0, 0.6),
    good("a", 1.5, 0.5),
    good("b", 3.0, 0.2),
    RequestResult("c", 4.0, failure=Failure("HTTP 404 model_not_found", "no such model")),
]
RUN = BenchRun(RESULTS, wall_s=2.0, client_cpu_s=0.1)


def test_every_model_and_every_failure_is_reported() -> None:
    found = report(RUN, {})
    assert {model: summary.num_requests for model, summary in found.by_model.items()} == {"a": 2, "b": 2, "c": 1}
    assert found.errors == {"HTTP 404 model_not_found": "no such model"}
    assert found.by_model["c"].errors == {"HTTP 404 model_not_found": 1}
    assert found.cold is None


def test_a_cold_test_separates_the_first_request_sent_to_each_model_from_later_ones() -> None:
    cold = report(RUN, {}, cold=True).cold
    assert cold is not None
    assert cold.first_use is not None
    assert cold.later is not None
    assert cold.first_use.ttft_ms is not None
    assert cold.later.ttft_ms is not None
    assert (cold.first_use.num_requests, round(cold.first_use.ttft_ms.mean)) == (3, 550)
    assert (cold.later.num_requests, round(cold.later.ttft_ms.mean)) == (2, 150)


def test_a_cold_test_with_one_request_per_model_has_no_later_summary() -> None:
    cold = report(BenchRun(RESULTS[:2], 1.0, 0.1), {}, cold=True).cold
    assert cold is not None
    assert cold.later is None


def test_the_tables_name_models_failures_and_first_uses() -> None:
    output = io.StringIO()
    print_report(Console(file=output, width=100), report(RUN, {}, cold=True))
    for shown in ("1 failed: HTTP 404 model_not_found: no such model", "first use", "later", "TTFT", "tok/s"):
        assert shown in output.getvalue()


@pytest.mark.parametrize("interrupted_by", [signal.SIGINT, None])
def test_an_interrupted_test_is_reported_as_such(interrupted_by: signal.Signals | None) -> None:
    found = report(replace(RUN, interrupted_by=interrupted_by), {})
    output = io.StringIO()
    print_report(Console(file=output, width=100), found)
    assert found.interrupted == ("interrupted" in output.getvalue()) == (interrupted_by is not None)


def test_long_names_and_markup_in_names_do_not_displace_the_figures() -> None:
    names = ["team-of-many-words/" + "a-long-name-of-an-adapter-" * 3, "s3://[/x]"]
    output = io.StringIO()
    run = BenchRun([good(name, 1.0, 0.25) for name in names], wall_s=2.0, client_cpu_s=0.1)
    print_report(Console(file=output, width=80), report(run, {}))
    assert "[/x]" in output.getvalue()
    assert output.getvalue().count("250.0") >= 2 * len(names)
    assert "TTFT p50" in output.getvalue()


def test_requests_that_were_sent_late_are_reported() -> None:
    output = io.StringIO()
    late = RequestResult("a", 1.0, late_s=1.7, ttft_s=1.8, e2e_s=2.0, output_tokens=1)
    print_report(Console(file=output, width=100), report(BenchRun([late], 2.0, 0.1), {}))
    assert "sent up to 1700 ms late" in output.getvalue()

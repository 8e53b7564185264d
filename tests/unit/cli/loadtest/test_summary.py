import pytest

from loraserve.cli.failure import Failure
from loraserve.cli.loadtest.client import RequestResult
from loraserve.cli.loadtest.summary import percentiles_ms, summarize


def good(model: str = "a", cached_tokens: int | None = None) -> RequestResult:
    result = RequestResult(model, 0.0, ttft_s=0.1, e2e_s=0.3, gaps_s=[0.1, 0.1], prompt_tokens=2, output_tokens=3)
    result.cached_tokens = cached_tokens
    return result


def test_percentiles_use_the_nearest_rank() -> None:
    found = percentiles_ms(i / 1000 for i in range(1, 101))
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max) == pytest.approx((50, 90, 99, 100))
    assert percentiles_ms([None]) is None


def test_failures_are_counted_by_code_and_excluded_from_times() -> None:
    bad = RequestResult("a", 0.0, ttft_s=9.0, failure=Failure("HTTP 500", "why"))
    found = summarize([good(), good(), bad, bad], wall_s=2.0)
    assert (found.num_requests, found.num_failed, found.errors) == (4, 2, {"HTTP 500": 2})
    assert found.output_tokens_per_s == pytest.approx(3.0)
    assert found.ttft_ms is not None
    assert found.ttft_ms.max == pytest.approx(100)
    assert found.tpot_ms is not None
    assert found.tpot_ms.mean == pytest.approx(100)
    assert summarize([bad], 1.0).ttft_ms is None


def test_cached_tokens_are_unknown_unless_the_server_reports_them() -> None:
    assert summarize([good()], 1.0).cached_tokens is None
    assert summarize([good(cached_tokens=2), good(cached_tokens=0)], 1.0).cached_tokens == 2

from xml.etree import ElementTree

import pytest

from loraserve.cli.failure import Failure
from loraserve.cli.loadtest.client import RequestResult
from loraserve.cli.loadtest.plot import MAX_BARS, _ttft_curves, plot
from loraserve.cli.loadtest.svg import axis_end


def result(model: str, ttft_s: float) -> RequestResult:
    return RequestResult(model, ttft_s, ttft_s=ttft_s, e2e_s=1.0, gaps_s=[0.01, 0.02], output_tokens=3)


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter() if element.text]


def test_shows_every_model_and_both_distributions() -> None:
    found = texts(plot([result("sql", 0.1), result("a < b", 0.2)]))
    assert {"Time to first token", "Between tokens", "sql", "a < b"} <= set(found)


def test_a_cold_test_has_a_curve_for_first_uses() -> None:
    results = [result("a", 0.1), result("a", 0.2)]
    assert {"first use", "later"} <= set(texts(plot(results, cold=True)))
    assert "first use" not in texts(plot(results))


def test_a_use_after_a_failed_first_use_counts_as_later() -> None:
    failed = RequestResult("a", 0.0, failure=Failure("timeout", ""))
    first, later = (curve.values for curve in _ttft_curves([failed, result("a", 0.1)], cold=True))
    assert (list(first), list(later)) == ([], [100.0])


def test_only_the_busiest_models_are_shown() -> None:
    results = [result(f"m{i}", 0.1) for i in range(MAX_BARS + 5)] + [result("last", 0.1)] * 2
    found = texts(plot(results))
    assert sum(text.startswith("m") or text == "last" for text in found) == MAX_BARS
    assert "last" in found


def test_a_test_in_which_everything_failed_still_has_a_plot() -> None:
    assert "Time to first token" in texts(plot([RequestResult("a", 0.0, failure=Failure("timeout", ""))]))


@pytest.mark.parametrize(("largest", "end"), [(0.0, 1.0), (0.03, 0.032), (1.0, 1.0), (17.0, 20.0), (431.0, 600.0)])
def test_an_axis_ends_at_a_round_number(largest: float, end: float) -> None:
    assert axis_end(largest) == pytest.approx(end)

import statistics
from itertools import pairwise
from random import Random

import pytest

from loraserve.cli.loadtest.arrivals import arrival_times_s


def gaps(cv: float, rate: float = 50.0, count: int = 20_000) -> list[float]:
    times_s = [0.0, *arrival_times_s(count, rate, cv, Random(0))]
    assert times_s == sorted(times_s)
    return [after - before for before, after in pairwise(times_s)]


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_coefficient_of_variation(cv: float) -> None:
    found = gaps(cv)
    assert statistics.mean(found) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.pstdev(found) / statistics.mean(found) == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_a_closed_loop_has_no_arrival_times() -> None:
    assert arrival_times_s(3, None, 1.0, Random(0)) == [0.0, 0.0, 0.0]

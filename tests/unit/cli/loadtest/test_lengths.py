import statistics
from random import Random

import pytest

from loraserve.cli.loadtest.lengths import (
    SHAREGPT_OUTPUT,
    SHAREGPT_PROMPT,
    Lengths,
    LognormalLengths,
    NormalLengths,
    UniformLengths,
)

COUNT = 20_000


def draw(lengths: Lengths) -> list[int]:
    random = Random(0)
    return [lengths.draw(random) for _ in range(COUNT)]


def test_uniform_lengths_cover_mean_plus_minus_spread() -> None:
    assert set(draw(UniformLengths(20, 5))) == set(range(15, 26))
    assert set(draw(UniformLengths(20))) == {20}


def test_normal_lengths_have_the_given_mean_and_deviation() -> None:
    found = draw(NormalLengths(200, 30))
    assert statistics.mean(found) == pytest.approx(200, abs=1)
    assert statistics.stdev(found) == pytest.approx(30, abs=1)


@pytest.mark.parametrize("lengths", [UniformLengths(2, 9), NormalLengths(2, 9), LognormalLengths(1, 1.2)])
def test_no_length_is_below_one(lengths: Lengths) -> None:
    assert min(draw(lengths)) == 1


@pytest.mark.parametrize("lengths", [SHAREGPT_PROMPT, SHAREGPT_OUTPUT])
def test_sharegpt_lengths_have_a_long_tail_up_to_a_maximum(lengths: LognormalLengths) -> None:
    found = draw(lengths)
    assert statistics.mean(found) == pytest.approx(lengths.mean, rel=0.03)
    assert statistics.median(found) < 0.75 * lengths.mean
    assert 4 * lengths.mean < max(found) <= lengths.MAX_SHARE * lengths.mean

from random import Random

import pytest

from loraserve.cli.loadtest.popularity import Distribution, choose_models

COUNT = 30_000


def shares(distribution: Distribution, models: str = "abc", zipf_s: float = 1.0, alpha: float = 1.0) -> list[float]:
    chosen = choose_models([*models], COUNT, distribution, Random(0), zipf_s=zipf_s, power_alpha=alpha)
    return [chosen.count(model) / COUNT for model in models]


def test_round_robin_takes_turns() -> None:
    chosen = choose_models(["a", "b", "c"], 5, Distribution.ROUND_ROBIN, Random(0), zipf_s=1, power_alpha=1)
    assert chosen == ["a", "b", "c", "a", "b"]


def test_uniform_chooses_all_models_equally_often() -> None:
    assert shares(Distribution.UNIFORM) == pytest.approx([1 / 3] * 3, abs=0.015)


def test_zipf_chooses_models_in_inverse_proportion_to_rank() -> None:
    assert shares(Distribution.ZIPF) == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.015)
    assert shares(Distribution.ZIPF, zipf_s=0.0) == pytest.approx([1 / 3] * 3, abs=0.015)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0, 4.0])
def test_power_follows_the_law_of_slora(alpha: float) -> None:
    # A share x of the list has density alpha * x ** (alpha - 1), so the first k of n get (k / n) ** alpha.
    expected = [((k + 1) / 4) ** alpha - (k / 4) ** alpha for k in range(4)]
    assert shares(Distribution.POWER, "abcd", alpha=alpha) == pytest.approx(expected, abs=0.015)

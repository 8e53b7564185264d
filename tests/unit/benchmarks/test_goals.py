import pytest

from benchmarks.goals import GOALS, Change, Goal, Ratio, Runs, changes, ratios

THROUGHPUT = Goal("ours", "theirs", "ours", "theirs", gate=2.0, stretch=3.0)
LATENCY = Goal("cached", "uncached", "cached", "uncached", gate=0.10, stretch=0.05, smaller_is_better=True)
BASE = next(goal for goal in GOALS if goal.reference == "vLLM, base")


def runs(ours: list[float], theirs: list[float]) -> Runs:
    return {BASE.figure: ours, BASE.reference: theirs}


@pytest.mark.parametrize(
    ("goal", "median", "verdict"),
    [
        (THROUGHPUT, 1.99, "no"),
        (THROUGHPUT, 2.0, "yes"),
        (THROUGHPUT, 3.0, "stretch"),
        (LATENCY, 0.11, "no"),
        (LATENCY, 0.10, "yes"),
        (LATENCY, 0.05, "stretch"),
    ],
)
def test_a_goal_is_met_at_its_limit(goal: Goal, median: float, verdict: str) -> None:
    assert Ratio(goal, [median]).verdict == verdict


def test_a_ratio_is_taken_within_each_repeat() -> None:
    # The machine halved its speed in the second repeat; the ratio did not change.
    (ratio,) = ratios(runs([100.0, 50.0, 90.0], [50.0, 25.0, 30.0]))
    assert ratio.repeats == [2.0, 2.0, 3.0]
    assert ratio.median == 2.0
    assert ratio.noise == 0.5


def test_goals_without_both_figures_are_left_out() -> None:
    assert ratios({BASE.figure: [1.0]}) == []


def test_only_a_loss_beyond_the_noise_is_one() -> None:
    committed = runs([99.0, 100.0, 101.0], [50.0] * 3)
    (within,) = changes(committed, runs([98.5] * 3, [50.0] * 3))
    (beyond,) = changes(committed, runs([90.0] * 3, [50.0] * 3))
    assert not within.is_loss
    assert beyond.is_loss
    assert beyond.loss == pytest.approx(0.1)


def test_a_longer_latency_is_a_loss() -> None:
    assert Change(Ratio(LATENCY, [0.05]), Ratio(LATENCY, [0.06])).is_loss
    assert not Change(Ratio(LATENCY, [0.05]), Ratio(LATENCY, [0.04])).is_loss

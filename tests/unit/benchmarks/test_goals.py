import pytest
import shapes
from goals import GATED, GOALS, MIN_NOISE, Change, Goal, Ratio, changes, in_process, ratios
from requests_file import in_turn, zipf
from results_file import Machine, Run

THROUGHPUT = Goal("ours", "ours", "theirs", "ours", "theirs", gate=2.0, stretch=3.0)
LATENCY = Goal("ttft", "cached", "uncached", "ours", "theirs", gate=0.10, stretch=0.05, smaller_is_better=True)
BASE = next(goal for goal in GOALS if goal.key == "vllm-base")


def run(ours: list[float], theirs: list[float], names: tuple[str, str] = ("ours", "theirs"), run_id: str = "1") -> Run:
    machine = Machine("cpu", 2, "AVX2", "3.11", "abc")
    return Run(run_id, "2026-01-01", 64, len(ours), machine, {}, dict(zip(names, (ours, theirs), strict=True)))


def base_run(ours: list[float], theirs: list[float], run_id: str = "1") -> Run:
    return run(ours, theirs, BASE.pair, run_id)


def ratio(goal: Goal, median: float) -> Ratio:
    return Ratio(goal, run([median], [1.0]), goal.pair)


@pytest.mark.parametrize(
    ("goal", "median", "verdict"),
    [
        (THROUGHPUT, 1.99, "no"),
        (THROUGHPUT, 2.0, "yes"),
        (THROUGHPUT, 3.0, "stretch"),
        (LATENCY, 0.11, "no"),
        (LATENCY, 0.10, "yes"),
        (LATENCY, 0.05, "stretch"),
        (Goal("overhead", "ours", "theirs", "ours", "theirs", gate=0.05, smaller_is_better=True), 0.01, "yes"),
        (Goal("x", "ours", "theirs", "ours", "theirs"), 2.0, ""),
    ],
)
def test_a_goal_is_met_at_its_limit(goal: Goal, median: float, verdict: str) -> None:
    assert ratio(goal, median).verdict == verdict


def test_goals_have_keys_and_gates_of_their_own() -> None:
    assert len({goal.key for goal in GOALS}) == len({goal.pair for goal in GOALS}) == len(GOALS)
    assert all(goal.gate is not None for goal in GATED)


def test_only_goals_against_other_servers_count_as_against_a_rival() -> None:
    own = {goal.key for goal in GOALS if not goal.is_against_rival}
    assert {"own-base", "registered", "ttft", "decode-base", "qwen-own-base", "prefix-cache"} <= own
    assert {"peft", "vllm-base", "llama-cpp", "qwen-vllm", "prefix-peft"}.isdisjoint(own)


def test_ratios_are_taken_within_each_repeat() -> None:
    # The machine was half as fast in the second repeat; the ratio did not change.
    (found,) = ratios([base_run([100.0, 50.0, 90.0], [50.0, 25.0, 30.0])])
    assert found.repeats == [2.0, 2.0, 3.0]
    assert found.median == 2.0
    assert found.deviations == [0.0, 0.0, 0.5]


def test_a_ratio_uses_the_newest_run_with_both_figures() -> None:
    newest_has_one = Run("3", "2026-01-01", 64, 1, base_run([], []).machine, {}, {BASE.figure: [9.0]})
    (found,) = ratios([base_run([1.0], [1.0], "1"), base_run([4.0], [2.0], "2"), newest_has_one])
    assert (found.median, found.run.id) == (2.0, "2")


def test_the_in_process_ratio_uses_the_newest_run_with_its_figures() -> None:
    assert BASE.in_process
    runs = [base_run([4.0], [2.0]), run([6.0], [2.0], BASE.in_process, "2")]
    found = in_process(runs, BASE)
    assert found is not None
    assert (found.median, found.run.id) == (3.0, "2")
    assert in_process(runs[:1], BASE) is None
    assert in_process(runs, next(goal for goal in GOALS if goal.key == "ttft")) is None


def test_goals_without_both_figures_are_left_out() -> None:
    assert ratios([run([1.0], [1.0])]) == []


def test_only_a_drop_beyond_the_noise_is_a_loss() -> None:
    committed = [base_run([99.0, 100.0, 101.0], [50.0] * 3)]
    (within,) = changes(committed, [base_run([98.5] * 3, [50.0] * 3)])
    (beyond,) = changes(committed, [base_run([90.0] * 3, [50.0] * 3)])
    assert not within.is_loss
    assert beyond.is_loss
    assert beyond.loss == pytest.approx(0.1)


def test_more_repeats_do_not_hide_a_loss() -> None:
    # All have the same spread. A noise estimate by range would grow with the repeats and hide a loss of a fifth.
    spread = [93.0, 100.0, 107.0, 86.0, 114.0, 97.0, 103.0]
    lost = [0.8 * value for value in spread]

    def is_loss(num_repeats: int) -> bool:
        (found,) = changes(
            [base_run(spread * num_repeats, [50.0] * 7 * num_repeats)],
            [base_run(lost * num_repeats, [50.0] * 7 * num_repeats)],
        )
        return found.is_loss

    assert is_loss(1)
    assert is_loss(3)
    (few,) = changes([base_run(spread[:3], [50.0] * 3)], [base_run([86.0, 107.0, 93.0], [50.0] * 3)])
    assert not few.is_loss


def test_a_single_repeat_has_the_minimum_noise() -> None:
    (found,) = changes([base_run([100.0], [50.0])], [base_run([97.0], [50.0])])
    assert (found.noise, found.is_loss) == (MIN_NOISE, True)


@pytest.mark.parametrize(("key", "mix"), [("own-base", "distinct"), ("zipf", "zipf")])
def test_byte_floors_of_goals_match_the_bytes_of_a_step(key: str, mix: str) -> None:
    shape, names = shapes.shapes()["llama-100m"].config, [f"lora-{i:04d}" for i in range(16)]
    hidden, kv = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
    linears = [(hidden, hidden)] * 2 + [(hidden, kv)] * 2 + [(hidden, shape.intermediate_size)] * 3
    layers = shape.num_hidden_layers
    weights = layers * sum(a * b for a, b in linears) + shape.vocab_size * hidden
    of_rank_1 = layers * sum(a + b for a, b in linears)
    keys_and_values = 16 * (128 + 64 // 2) * layers * 2 * kv
    models = in_turn(names, 64) if mix == "distinct" else zipf(names, 64)
    steps = [set(models[i : i + 16]) for i in range(len(models) - 15)]
    ranks = [sum(shapes.RANKS[int(name[-4:]) % 3] for name in step) for step in steps]
    base = weights + keys_and_values
    floor = base / (base + of_rank_1 * sum(ranks) / len(ranks))
    assert next(goal for goal in GOALS if goal.key == key).floor == round(floor, 2)


def test_a_slower_machine_is_no_loss() -> None:
    (found,) = changes([base_run([100.0], [50.0])], [base_run([10.0], [5.0])])
    assert found.loss == 0


def test_a_longer_latency_is_a_loss() -> None:
    assert Change(ratio(LATENCY, 0.05), ratio(LATENCY, 0.06)).is_loss
    assert not Change(ratio(LATENCY, 0.05), ratio(LATENCY, 0.04)).is_loss

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from gpu.record import Arm, Figure, Record
from gpu.results import Results
from gpu.work import Prefill, Work
from gpu_goals import ATTENTION_CASES, NOT_MEASURED, Goal, goals, goals_table, report, rivals_table

WORK = Work(batch_sizes=(1, 64), prefills=(Prefill(1, 2048, 1),), cold_prompts=(16, 512), loading_prompts=(16,))
TOKENS = WORK.num_tokens


def step(arm: Arm, batch_size: int, num_adapters: int, value: float, adapters: str = "r16") -> Record:
    return Record(arm, Figure.DECODE_STEP, batch_size, num_adapters, TOKENS, TOKENS, value, adapters)


ENGINE = [
    Record(Arm.MACHINE, Figure.ADAPTER_COPY, 0, 1, 0, 0, 2.0),
    step(Arm.FLOOR, 1, 0, 3.5),
    step(Arm.FLOOR, 1, 1, 3.75),
    step(Arm.FLOOR, 64, 0, 4.0),
    step(Arm.FLOOR, 64, 1, 4.25),
    step(Arm.FLOOR, 64, 8, 4.5),
    step(Arm.FLOOR, 64, 64, 5.0),
    step(Arm.NO_LORA, 1, 0, 3.5),
    step(Arm.NO_LORA, 64, 0, 5.0),
    step(Arm.LORA, 1, 0, 3.5),
    step(Arm.LORA, 1, 1, 4.0),
    step(Arm.LORA, 64, 0, 6.25),
    step(Arm.LORA, 64, 1, 5.5),
    step(Arm.LORA, 64, 8, 6.0),
    step(Arm.LORA, 64, 64, 8.0),
    step(Arm.LORA, 64, 64, 6.25, "r16 qkvo"),
    Record(Arm.NO_LORA, Figure.PREFILL, 1, 0, 2048, 1, 40.0),
    Record(Arm.LORA, Figure.PREFILL, 1, 1, 2048, 1, 42.0),
    Record(Arm.LORA, Figure.HOST, 64, 64, TOKENS, 32, 0.125),
    Record(Arm.LORA, Figure.GPU_WAITS_P50, 64, 64, TOKENS, 32, 0.040),
    Record(Arm.LORA, Figure.FROM_HOST_ADDS, 1, 1, 16, 1, 2.0),
    Record(Arm.LORA, Figure.FROM_HOST_ADDS, 1, 1, 512, 1, 1.5),
    Record(Arm.LORA, Figure.GAP_LOADING, 16, 16, 16, 1, 6.3),
    Record(Arm.LORA, Figure.GAP_LOADED, 16, 16, 16, 1, 6.0),
]
RIVALS = [
    replace(step(Arm.TRANSFORMERS, 64, 0, 25.0), output_tokens=16),
    Record(Arm.PEFT, Figure.OUTPUT, 64, 64, TOKENS, 16, 100.0),
    replace(step(Arm.PEFT, 64, 64, 400.0), output_tokens=16),
    replace(step(Arm.PEFT, 16, 16, 200.0), output_tokens=16),
]


def attention(case: str, arm: str, median_us: float) -> dict[str, object]:
    return {"name": case, "arm": arm, "size_bytes": 400_000_000, "median_us": median_us}


def content(engine: Sequence[Record], rivals: Sequence[Record], kernels: Sequence[dict[str, object]]) -> dict:
    ceilings = {"copy_bytes_per_s": 3.0e12, "read_bytes_per_s": 4.0e12}
    return {
        "date": "2026-01-01",
        "commit": "abc",
        "machine": {"gpu": "a GPU"},
        "versions": {"torch": "2"},
        "parts": [
            {"name": "tests", "content": {}},
            {"name": "engine", "content": {"results": [asdict(record) for record in engine]}},
            {"name": "rivals", "content": {"results": [asdict(record) for record in rivals]}},
            {"name": "paged_decode", "content": {"ceilings": ceilings, "results": list(kernels)}},
        ],
    }


def results(
    engine: Sequence[Record] = (), rivals: Sequence[Record] = (), kernels: Sequence[dict[str, object]] = ()
) -> Results:
    return Results(content(engine, rivals, kernels), TOKENS)


def rows(table: str) -> list[list[str]]:
    return [line[2:-2].split(" | ") for line in table.splitlines()[2:]]


def test_every_goal_is_computed_from_the_measurements() -> None:
    kernels = [attention(case, "ours", 125.0) for case in ATTENTION_CASES]
    kernels.insert(0, attention(ATTENTION_CASES[0], "torch dense", 1.0))
    measured = [(row[0], row[1], *row[4:]) for row in rows(goals_table(results(ENGINE, RIVALS, kernels), WORK))]
    assert measured == [
        ("byte floor / step, base-only decode", "B 1", "**1**", "stretch"),
        ("byte floor / step, base-only decode", "B 64", "**0.8**", "yes"),
        ("LoRA's time beyond its bytes", "B 1, D 1", "**0.25 ms**", "stretch"),
        ("LoRA's time beyond its bytes", "B 64, D 1", "**0.25 ms**", "stretch"),
        ("LoRA's time beyond its bytes", "B 64, D 8", "**0.5 ms**", "yes"),
        ("LoRA's time beyond its bytes", "B 64, D 64", "**2 ms**", "no"),
        ("LoRA / base, 1 adapter", "B 64", "**0.909**", "yes"),
        ("LoRA / base, 8 adapters", "B 64", "**0.833**", "no"),
        ("LoRA / base, 64 distinct adapters", "B 64", "**0.625**", "no"),
        ("LoRA / base, 64 distinct adapters on attention", "B 64", "**0.8**", "no"),
        ("base on the engine with LoRA / without", "B 1", "**1**", "stretch"),
        ("base on the engine with LoRA / without", "B 64", "**0.8**", "no"),
        *(("decode attention / bandwidth", case, "**80 %**", "yes") for case in ATTENTION_CASES),
        ("LoRA adds to prefill", "1 x 2048 tokens, D 1", "**5 %**", "yes"),
        ("host time of a step", "B 64, D 64", "**0.125 ms**", "stretch"),
        ("GPU waits for the host in a step", "B 64, D 64, profiled, p50", "**40 µs**", "yes"),
        ("cold adapter adds / its copy alone", "prompt of 512", "**0.75**", "no"),
        ("others' tokens while an adapter loads / loaded", "B 16, D 16, p99, prompt of 16", "**1.05**", "yes"),
    ]


def test_limits_are_shown_in_the_units_of_their_goals() -> None:
    limits = {(row[0], row[2], row[3]) for row in rows(goals_table(results(), WORK))}
    assert limits == {
        ("byte floor / step, base-only decode", "≥ 0.8", "≥ 0.9"),
        ("LoRA's time beyond its bytes", "≤ 0.6 ms", "≤ 0.25 ms"),
        ("LoRA / base, 1 adapter", "≥ 0.88", "≥ 0.95"),
        ("LoRA / base, 8 adapters", "≥ 0.85", "≥ 0.92"),
        ("LoRA / base, 64 distinct adapters", "≥ 0.65", "≥ 0.74"),
        ("LoRA / base, 64 distinct adapters on attention", "≥ 0.82", "≥ 0.9"),
        ("base on the engine with LoRA / without", "≥ 0.99", "≥ 1"),
        ("decode attention / bandwidth", "≥ 75 %", "≥ 88 %"),
        ("LoRA adds to prefill", "≤ 8 %", "≤ 3 %"),
        ("host time of a step", "≤ 0.5 ms", "≤ 0.2 ms"),
        ("GPU waits for the host in a step", "≤ 60 µs", "≤ 20 µs"),
        ("cold adapter adds / its copy alone", "≤ 0.5", "≤ 0.15"),
        ("others' tokens while an adapter loads / loaded", "≤ 1.1", "≤ 1.03"),
    }


@pytest.mark.parametrize("missing", ENGINE)
def test_a_goal_without_one_of_its_figures_is_not_measured(missing: Record) -> None:
    kept = [record for record in ENGINE if record is not missing]
    table = [row[:5] for row in rows(goals_table(results(kept), WORK))]
    complete = [row[:5] for row in rows(goals_table(results(ENGINE), WORK))]
    changed = [row for row, before in zip(table, complete, strict=True) if row != before]
    assert [row[4] for row in changed] == [NOT_MEASURED] * len(changed)
    # Only prompts long enough to hide the copy behind their computation have a goal for their own first token.
    assert bool(changed) == ((missing.figure, missing.prompt_tokens) != (Figure.FROM_HOST_ADDS, 16))


def test_batches_of_256_have_goals_for_host_time_gpu_waits_and_attention_only() -> None:
    where = {(row[0], row[1], row[2]) for row in rows(goals_table(results(), Work())) if "256" in row[1]}
    assert where == {
        ("host time of a step", "B 256, D 64", "≤ 1.2 ms"),
        ("GPU waits for the host in a step", "B 256, D 64, profiled, p50", "≤ 60 µs"),
        ("decode attention / bandwidth", "decode 64 x 256 .. 8192", "≥ 75 %"),
    }


@pytest.mark.parametrize(
    ("smaller_is_better", "value", "verdict"),
    [
        (False, 1.99, "no"),
        (False, 2.0, "yes"),
        (False, 3.0, "stretch"),
        (True, 4.01, "no"),
        (True, 4.0, "yes"),
        (True, 3.0, "stretch"),
    ],
)
def test_a_goal_is_met_at_its_limit(smaller_is_better: bool, value: float, verdict: str) -> None:
    gate = 4.0 if smaller_is_better else 2.0
    assert Goal("goal", "", gate, 3.0, lambda _: 0.0, smaller_is_better).verdict(value) == verdict


def test_rivals_are_compared_with_the_engine_on_the_same_work() -> None:
    assert rows(rivals_table(results(ENGINE, RIVALS))) == [
        ["transformers", "B 64, D 0", "25 ms", "5 ms", "**5**"],
        ["peft", "B 64, D 64", "400 ms", "8 ms", "**50**"],
        ["peft", "B 16, D 16", "200 ms", NOT_MEASURED, ""],
    ]
    assert rivals_table(results(ENGINE)) == NOT_MEASURED


def test_a_report_of_an_empty_run_claims_nothing() -> None:
    text = report({**content([], [], []), "parts": []})
    assert text.startswith("a GPU, 2026-01-01, commit `abc`, torch 2. ")
    assert text.count(NOT_MEASURED) == len(goals(Work())) + 1

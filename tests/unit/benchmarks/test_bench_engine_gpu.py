"""The GPU benchmark of the engine, whole, with a tiny model on the CPU."""

import time
from dataclasses import asdict
from pathlib import Path

import pytest
from bench_engine_gpu import measure
from gpu.record import Arm, Figure, Record
from gpu.results import Results
from gpu.work import RANK_16, AdapterKind, Prefill, Work
from gpu_goals import NOT_MEASURED, goals
from transformers import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)
WORK = Work(
    batch_sizes=(1, 2, 4),
    num_tokens=8,
    kind=AdapterKind(RANK_16.name, (16,), num_adapters=4),
    other_kinds=(AdapterKind("mixed", (4, 8), ("q_proj", "v_proj"), num_adapters=3),),
    max_num_batched_tokens=256,
    kv_cache_memory_bytes=8 << 20,
    prefills=(Prefill(1, 32, 1), Prefill(4, 16, 2)),
    prefill_repeats=1,
    cold_prompts=(8, 512),
    cold_repeats=1,
    profiled_steps=3,
    probe_bytes=1 << 20,
    warm_tokens=2,
)
LORA_POINTS = {(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 3), (4, 4)}
NOT_HERE = {
    "decode attention / bandwidth",
    "GPU waits for the host in a step",
    "LoRA / base, 4 distinct adapters on attention",
}
"""On a GPU only, or of a kind that is not measured here."""


def run(folder: Path, seconds: float) -> list[Record]:
    return list(measure(CONFIG, WORK, folder, "cpu", time.monotonic() + seconds))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def records(folder: Path) -> list[Record]:
    return run(folder, 600)


def points(records: list[Record], arm: Arm, figure: Figure) -> list[tuple[int, int]]:
    return [(each.batch_size, each.num_adapters) for each in records if (each.arm, each.figure) == (arm, figure)]


def test_every_arm_has_every_decode_step_of_its_own(records: list[Record]) -> None:
    for figure in (Figure.DECODE_STEP, Figure.DECODE_STEP_P90, Figure.OUTPUT):
        assert points(records, Arm.NO_LORA, figure) == [(1, 0), (2, 0), (4, 0)]
        assert sorted(points(records, Arm.LORA, figure)) == sorted(LORA_POINTS)
    assert sorted(points(records, Arm.FLOOR, Figure.DECODE_STEP)) == sorted(LORA_POINTS)
    assert points(records, Arm.LORA, Figure.PROFILED_STEP) == [(1, 1), (2, 2), (4, 4)]


def test_adapters_are_measured_in_their_file_and_after_others_took_their_place(records: list[Record]) -> None:
    for figure in (Figure.FROM_FILE, Figure.FROM_FILE_ADDS, Figure.FROM_HOST, Figure.FROM_HOST_ADDS):
        assert [each.prompt_tokens for each in records if each.figure is figure] == [8, 512]


def test_times_and_rates_are_positive(records: list[Record]) -> None:
    differences = (Figure.FROM_FILE_ADDS, Figure.FROM_HOST_ADDS)
    assert [each for each in records if each.figure not in differences and not each.value > 0] == []


def test_goals_find_every_figure_they_need(records: list[Record]) -> None:
    part = {"name": "engine", "content": {"results": [asdict(record) for record in records]}}
    results = Results({"parts": [part]}, WORK.num_tokens)
    rows = [goal.row(results) for goal in goals(WORK)]
    assert {row[0] for row in rows if NOT_MEASURED in row} == NOT_HERE


def test_adapters_of_another_kind_are_measured_last_and_their_files_are_gone(
    records: list[Record], folder: Path
) -> None:
    mixed = [each for each in records if each.adapters == "mixed"]
    assert [(each.arm, each.figure) for each in mixed] == [
        (Arm.FLOOR, Figure.DECODE_STEP),
        *((Arm.LORA, figure) for figure in (Figure.DECODE_STEP, Figure.DECODE_STEP_P90, Figure.OUTPUT)),
    ]
    assert mixed[1:] == records[-3:]
    assert {(each.batch_size, each.num_adapters) for each in mixed} == {(4, 3)}
    assert [path.name for path in folder.iterdir()] == ["model"]


def test_once_the_time_is_over_no_engine_is_started(tmp_path: Path) -> None:
    assert {record.arm for record in run(tmp_path, -1)} == {Arm.MACHINE, Arm.FLOOR}
    assert list(tmp_path.iterdir()) == []

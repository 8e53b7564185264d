"""The complete GPU benchmark of the engine, with a tiny model on the CPU."""

import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from bench_engine_gpu import file_system, measure
from gpu.first_token import FROM_DISK, FROM_FILE, FROM_HOST
from gpu.record import Arm, Figure, LeftOut, Record
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
    batch_sizes=(1, 2, 4, 5),
    num_tokens=8,
    kind=AdapterKind(RANK_16.name, (16,), num_adapters=4),
    other_kinds=(
        AdapterKind("large", (64,), num_adapters=2),
        AdapterKind("mixed", (4, 8), ("q_proj", "v_proj"), num_adapters=3, batch_sizes=(2, 4)),
    ),
    max_num_batched_tokens=256,
    kv_cache_memory_bytes=8 << 20,
    prefills=(Prefill(1, 32, 1), Prefill(4, 16, 2)),
    prefill_repeats=1,
    cold_prompts=(8, 512),
    cold_repeats=2,
    loading_prompts=(8, 100),
    loading_batch_size=4,
    loading_steps=3,
    profiled_steps=3,
    probe_bytes=1 << 20,
    warm_tokens=2,
    turn_steps=3,
)
LORA_POINTS = {(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 4), (5, 0), (5, 1), (5, 4)}
NOT_HERE = {
    "decode attention / bandwidth",
    "GPU waits for the host in a step",
    "LoRA / base, 4 distinct adapters on attention",
}
"""Goals that need a GPU or an adapter kind that is not measured here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Record | LeftOut]:
    return list(measure(CONFIG, WORK, folder, "cpu", time.monotonic() + 600))


@pytest.fixture(scope="module")
def records(found: list[Record | LeftOut]) -> list[Record]:
    return [each for each in found if isinstance(each, Record)]


def points(records: list[Record], arm: Arm, figure: Figure) -> list[tuple[int, int]]:
    return [
        (each.batch_size, each.num_adapters)
        for each in records
        if (each.arm, each.figure, each.adapters) == (arm, figure, RANK_16.name)
    ]


def test_every_arm_has_all_its_decode_points(records: list[Record]) -> None:
    for figure in (Figure.DECODE_STEP, Figure.OUTPUT):
        assert points(records, Arm.NO_LORA, figure) == [(1, 0), (2, 0), (4, 0), (5, 0)]
        assert sorted(points(records, Arm.LORA, figure)) == sorted(LORA_POINTS)
    assert sorted(points(records, Arm.FLOOR, Figure.DECODE_STEP)) == sorted(LORA_POINTS)
    assert points(records, Arm.LORA, Figure.PROFILED_STEP) == [(1, 1), (2, 2), (4, 4), (5, 4)]


def test_cold_adapters_are_measured_from_host_file_and_disk(records: list[Record]) -> None:
    for figure in (*FROM_HOST, *FROM_FILE, *FROM_DISK):
        assert [each.prompt_tokens for each in records if each.figure is figure] == [8, 512]
    warm = [each for each in records if each.figure is Figure.FIRST_TOKEN]
    assert [each.prompt_tokens for each in warm] == [8, 512] * 3
    assert {each.repeats for each in warm} == {2}
    reads = [each for each in records if each.figure in (Figure.DISK_READ, Figure.FILE_READ, Figure.ADAPTER_BYTES)]
    assert len(reads) == 3


def test_token_gaps_are_measured_while_adapters_load_and_once_they_are_loaded(records: list[Record]) -> None:
    gaps = [each for each in records if each.figure in (Figure.GAP_LOADING, Figure.GAP_LOADED)]
    assert [each.prompt_tokens for each in gaps] == [8, 8, 100, 100]
    assert {(each.batch_size, each.num_adapters) for each in gaps} == {(4, 2)}
    assert {each.repeats for each in gaps} == {2 * 3}


def test_times_and_rates_are_positive(records: list[Record]) -> None:
    differences = (Figure.FROM_DISK_ADDS, Figure.FROM_FILE_ADDS, Figure.FROM_HOST_ADDS)
    assert [each for each in records if each.figure not in differences and not each.value > 0] == []


def test_every_goal_that_needs_no_gpu_is_measured(records: list[Record]) -> None:
    part = {"name": "engine", "content": {"results": [asdict(record) for record in records]}}
    results = Results({"parts": [part]}, WORK.num_tokens)
    rows = [goal.row(results) for goal in goals(WORK)]
    assert {row[0] for row in rows if NOT_MEASURED in row} == NOT_HERE


def test_adapters_of_other_kinds_are_measured_last_and_their_files_deleted(records: list[Record], folder: Path) -> None:
    mixed = [each for each in records if each.adapters == "mixed"]
    assert [(each.arm, each.figure) for each in mixed] == [
        *([(Arm.FLOOR, Figure.DECODE_STEP)] * 2),
        *([(Arm.LORA, Figure.DECODE_STEP), (Arm.LORA, Figure.OUTPUT)] * 2),
    ]
    assert mixed[2:] == records[-4:]
    assert {(each.batch_size, each.num_adapters) for each in mixed} == {(2, 2), (4, 3)}
    assert [path.name for path in folder.iterdir()] == ["model"]


def test_no_engine_is_started_after_the_deadline(tmp_path: Path) -> None:
    *records, left_out = measure(CONFIG, replace(WORK, seed=7), tmp_path, "cpu", time.monotonic() - 1)
    assert torch.initial_seed() == 7
    assert {record.arm for record in records if isinstance(record, Record)} == {Arm.MACHINE, Arm.FLOOR}
    assert left_out == LeftOut("the engines", "the time was over")
    assert list(tmp_path.iterdir()) == []


def test_adapter_files_are_created_only_when_they_are_measured(tmp_path: Path) -> None:
    found = measure(CONFIG, WORK, tmp_path / "memory", "cpu", time.monotonic() + 600, tmp_path / "disk")
    for each in found:
        if isinstance(each, Record) and each.figure is Figure.PREFILL:
            assert not (tmp_path / "disk").exists()
        if isinstance(each, Record) and each.figure is Figure.DISK_READ:
            break
    num_made = len(list((tmp_path / "disk").rglob("*.packed")))
    assert num_made == 2 * WORK.num_cold_adapters + 1, "with the one that all are made from"


def test_points_that_exceed_adapter_memory_are_listed_as_left_out(found: list[Record | LeftOut]) -> None:
    left_out = [each.what for each in found if isinstance(each, LeftOut)]
    assert left_out[:2] == ["decode with 5 adapters r16", "decode with 2 adapters large"]


def test_decode_steps_are_repeated_and_have_deciles(records: list[Record]) -> None:
    for arm in (Arm.NO_LORA, Arm.LORA):
        (step,) = [
            each
            for each in records
            if (each.arm, each.figure, each.batch_size, each.num_adapters) == (arm, Figure.DECODE_STEP, 4, 0)
        ]
        assert step.repeats > 1
        assert step.p10 is not None
        assert step.p90 is not None
        assert step.p10 <= step.value <= step.p90


def test_file_system_is_read_from_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"a / ext4 rw 0 0\nb {tmp_path} tmpfs rw 0 0\nc {tmp_path}/other xfs rw 0 0\n")
    assert file_system(tmp_path / "file", mounts) == "tmpfs"
    assert file_system(tmp_path / "other" / "file", mounts) == "xfs"
    assert file_system(tmp_path / "file", tmp_path / "none") == ""

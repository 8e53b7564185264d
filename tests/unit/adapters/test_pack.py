from pathlib import Path

import numpy as np
import pytest
from loraserve_adapters.base_layout import BaseModule
from loraserve_adapters.dtypes import STORAGE, convert
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.pack import load_and_pack, pack, plan_payload
from loraserve_adapters.packed import ALIGNMENT_BYTES
from loraserve_adapters.source import read_adapter

from tests.unit.adapters.folders import (
    HIDDEN,
    config_of,
    lora_key,
    lora_tensors,
    magnitude_key,
    raw_tensor,
    tiny_layout,
    values_of,
    with_magnitudes,
    write_folder,
)


@pytest.mark.parametrize("dtype", STORAGE)
def test_lays_out_mixed_ranks_as_documented(dtype: str, tmp_path: Path) -> None:
    layout = tiny_layout(dtype)
    tensors = lora_tensors(layout, ["0.self_attn.q_proj", "lm_head"], rank=3)
    tensors |= lora_tensors(layout, ["0.self_attn.v_proj"], rank=5)
    config = config_of(
        r=3,
        lora_alpha=6,
        target_modules=["0.self_attn.q_proj", "0.self_attn.v_proj", "lm_head"],
        rank_pattern={"v_proj": 5},
    )
    packed = load_and_pack(write_folder(tmp_path / "adapter", config, tensors), layout, tmp_path)
    table = packed.table
    assert table.lora_rank.tolist() == [3, 0, 5, *[0] * 11, 3]
    assert table.scaling[[0, 2, 14]].tolist() == pytest.approx([2.0, 1.2, 2.0])
    assert table.scaling[1] == 0
    assert table.max_lora_rank == 5
    assert (table.offset_a >= 0).nonzero()[0].tolist() == [0, 8]
    assert (table.offset_b >= 0).nonzero()[0].tolist() == [0, 2, 14]
    values = np.array(packed.payload).view(STORAGE[dtype])
    item_bytes = values.itemsize
    present = [offset for offset in [*table.offset_a.tolist(), *table.offset_b.tolist()] if offset >= 0]
    assert all(offset * item_bytes % ALIGNMENT_BYTES == 0 for offset in present)
    q, v = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
    both_a = np.concatenate([values_of(tensors[lora_key(name, "A")]) for name in (q, v)])
    start = int(table.offset_a[0])
    assert np.array_equal(values[start : start + 8 * 32].reshape(8, 32), convert(both_a, "float32", dtype))
    start = int(table.offset_b[2])
    b_of_v = convert(values_of(tensors[lora_key(v, "B")]), "float32", dtype)
    assert np.array_equal(values[start : start + 5 * 16].reshape(5, 16), b_of_v.T)
    assert packed.size_bytes % ALIGNMENT_BYTES == 0


def test_plans_exactly_the_bytes_that_the_ranks_need() -> None:
    layout = tiny_layout("bfloat16")
    num_members = sum(len(group) for group in layout.groups)
    assert plan_payload(layout.groups, [0] * num_members, "bfloat16").size_bytes == 0
    plan = plan_payload(layout.groups, [1] + [0] * (num_members - 1), "bfloat16")
    assert (plan.offset_a[0], plan.offset_b[0], plan.size_bytes) == (0, 128, 512)


@pytest.mark.parametrize(
    ("dtype", "starts_of_b", "starts_of_magnitudes", "size_bytes"),
    [
        ("float32", [512, 1792], [1024, 2304], 2816),
        ("bfloat16", [256, 1280], [512, 1536], 2048),
        ("float16", [256, 1280], [512, 1536], 2048),
    ],
)
def test_plans_magnitudes_in_float32_whatever_the_dtype(
    dtype: str, starts_of_b: list[int], starts_of_magnitudes: list[int], size_bytes: int
) -> None:
    """All sizes in bytes: magnitudes and zeros take 768 for 96 outputs and 320 for 40."""
    group = (BaseModule("q", 32, 96), BaseModule("k", 32, 16), BaseModule("v", 32, 40))
    plan = plan_payload([group], [1, 0, 2], dtype, has_magnitude=[True, False, True])
    item_bytes = STORAGE[dtype].itemsize
    for found, starts in ((plan.offset_b, starts_of_b), (plan.offset_magnitude, starts_of_magnitudes)):
        assert found[1] == -1
        assert (found[[0, 2]] * item_bytes).tolist() == starts
    assert plan.size_bytes == size_bytes
    without = plan_payload([group], [1, 0, 2], dtype)
    assert without.offset_magnitude.tolist() == [-1] * 3
    assert without.size_bytes == size_bytes - 768 - 512


@pytest.mark.parametrize("use_dora", [False, True])
def test_large_tensors_are_packed_block_by_block(
    use_dora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = tiny_layout("bfloat16")
    tensors = lora_tensors(layout, ["q_proj"])
    folder = write_folder(
        tmp_path / "adapter", config_of(use_dora=use_dora), with_magnitudes(tensors) if use_dora else tensors
    )
    pack(read_adapter(folder, layout), layout, tmp_path / "whole")
    monkeypatch.setattr("loraserve_adapters.safetensors_file._BLOCK_BYTES", 40)
    pack(read_adapter(folder, layout), layout, tmp_path / "in_blocks")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "in_blocks").read_bytes()


@pytest.mark.parametrize(("dtype", "value"), [("float16", 1e5), ("bfloat16", 3.4e38)])
def test_refuses_values_that_overflow_the_base_dtype(dtype: str, value: float, tmp_path: Path) -> None:
    layout = tiny_layout(dtype)
    tensors = lora_tensors(layout, ["q_proj"])
    name = lora_key("model.layers.1.self_attn.q_proj", "B")
    tensors[name] = raw_tensor(np.full((32, 4), value, np.float32))
    with pytest.raises(AdapterError, match=dtype) as refused:
        load_and_pack(write_folder(tmp_path / "adapter", config_of(), tensors), layout, tmp_path)
    assert (refused.value.code, refused.value.key) == ("not_finite", name)
    assert not list(tmp_path.glob("*.packed"))


def test_refuses_a_folder_that_changed_after_it_was_verified(tmp_path: Path) -> None:
    layout = tiny_layout()
    folder = write_folder(tmp_path, config_of(), lora_tensors(layout, ["q_proj"]))
    source = read_adapter(folder, layout)
    write_folder(tmp_path, config_of(), lora_tensors(layout, ["q_proj"], seed=1))
    with pytest.raises(AdapterError) as refused:
        pack(source, layout, tmp_path / "out")
    assert refused.value.code == "file_changed"
    write_folder(tmp_path, config_of(), lora_tensors(layout, ["q_proj"], rank=2))
    with pytest.raises(AdapterError) as refused:
        pack(source, layout, tmp_path / "out")
    assert refused.value.code == "file_changed"


def test_uses_the_cached_file_and_repairs_a_damaged_one(tmp_path: Path) -> None:
    layout = tiny_layout()
    folder = write_folder(tmp_path / "adapter", config_of(), lora_tensors(layout, ["q_proj"]))
    cache_dir = tmp_path / "cache" / "packed"
    first = load_and_pack(folder, layout, cache_dir)
    (path,) = cache_dir.iterdir()
    assert path.name == f"{first.digest}-{layout.fingerprint[:16]}-float32-v2.packed"
    written = path.stat()
    again = load_and_pack(folder, layout, cache_dir)
    assert path.stat().st_ino == written.st_ino
    assert np.array_equal(first.payload, again.payload)
    expected = np.array(first.payload)
    damaged = bytearray(path.read_bytes())
    damaged[-300] ^= 1
    path.write_bytes(damaged)
    assert np.array_equal(load_and_pack(folder, layout, cache_dir).payload, expected)
    assert [file.name for file in cache_dir.iterdir()] == [path.name]


def test_biases_are_packed_aligned_in_the_base_dtype(tmp_path: Path) -> None:
    layout = tiny_layout("bfloat16")
    tensors = lora_tensors(layout, ["k_proj", "v_proj"])
    bias = np.arange(16, dtype=np.float32)
    for name in [*tensors]:
        if name.endswith("lora_B.weight"):
            tensors[name.replace("weight", "bias")] = raw_tensor(bias)
    config = config_of(target_modules=["k_proj", "v_proj"], lora_bias=True)
    packed = load_and_pack(write_folder(tmp_path / "adapter", config, tensors), layout, tmp_path)
    table = packed.table
    assert (table.offset_bias >= 0).nonzero()[0].tolist() == [1, 2, 8, 9]
    assert all(offset * 2 % ALIGNMENT_BYTES == 0 for offset in table.offset_bias if offset >= 0)
    values = np.array(packed.payload).view(np.uint16)
    for start in table.offset_bias[table.offset_bias >= 0].tolist():
        assert np.array_equal(values[start : start + 16], convert(bias, "float32", "bfloat16"))


@pytest.mark.parametrize("dtype", STORAGE)
def test_magnitudes_in_float32_and_as_many_zeros_follow_their_b(dtype: str, tmp_path: Path) -> None:
    layout = tiny_layout(dtype)
    plain = lora_tensors(layout, ["k_proj", "v_proj"])
    tensors = with_magnitudes(plain, "bfloat16" if dtype == "float16" else "float32")
    config = config_of(target_modules=["k_proj", "v_proj"], use_dora=True)
    packed = load_and_pack(write_folder(tmp_path / "adapter", config, tensors), layout, tmp_path)
    table = packed.table
    assert (table.offset_magnitude >= 0).nonzero()[0].tolist() == [1, 2, 8, 9]
    assert not (table.offset_bias >= 0).any()
    payload, item_bytes = np.array(packed.payload), STORAGE[dtype].itemsize
    members = [member for group in layout.groups for member in group]
    for index in (1, 2, 8, 9):
        start = int(table.offset_magnitude[index]) * item_bytes
        assert start % ALIGNMENT_BYTES == 0
        assert start - int(table.offset_b[index]) * item_bytes == 256  # a B of 4 * 16, aligned
        found, zeros = payload[start : start + 128].view(np.float32).reshape(2, 16)
        assert np.array_equal(found, values_of(tensors[magnitude_key(members[index].name)]))
        assert not zeros.any()
    without = load_and_pack(write_folder(tmp_path / "plain", {**config, "use_dora": False}, plain), layout, tmp_path)
    assert not (without.table.offset_magnitude >= 0).any()
    assert packed.size_bytes == without.size_bytes + 4 * 256


@pytest.mark.parametrize(("dtype", "value"), [("float16", 1e5), ("bfloat16", 3.4e38), ("float16", 1e-30)])
def test_magnitudes_need_not_fit_the_base_dtype(dtype: str, value: float, tmp_path: Path) -> None:
    layout = tiny_layout(dtype)
    tensors = with_magnitudes(lora_tensors(layout, ["q_proj"]))
    tensors[magnitude_key("model.layers.1.self_attn.q_proj")] = raw_tensor(np.full(HIDDEN, value, np.float32))
    packed = load_and_pack(write_folder(tmp_path / "adapter", config_of(use_dora=True), tensors), layout, tmp_path)
    start = int(packed.table.offset_magnitude[7]) * 2
    assert np.array_equal(np.array(packed.payload)[start : start + 128].view(np.float32), np.full(HIDDEN, value, "f4"))


def test_the_packed_file_of_an_activated_adapter_has_its_invocation(tmp_path: Path) -> None:
    layout = tiny_layout()
    for invocation in (None, [5, 9, 5]):
        config = config_of(alora_invocation_tokens=invocation)
        folder = write_folder(tmp_path / str(invocation), config, lora_tensors(layout, ["q_proj"]))
        assert load_and_pack(folder, layout, tmp_path).table.invocation_token_ids == tuple(invocation or ())


def test_keeps_one_file_per_layout(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "adapter", config_of(), lora_tensors(tiny_layout(), ["q_proj"]))
    packed = [load_and_pack(folder, tiny_layout(dtype), tmp_path / "cache") for dtype in ("float32", "bfloat16")]
    assert packed[0].digest == packed[1].digest
    assert len(list((tmp_path / "cache").iterdir())) == 2

import contextlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import AdapterLimits
from loraserve_adapters.safetensors_file import header_end, open_weights, parse_header

from tests.unit.adapters.folders import safetensors_bytes, with_header


def tensor(start: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


def parse(header: object, data_size: int = 0, limits: AdapterLimits | None = None) -> tuple:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = with_header(raw)
    return parse_header(data, len(data) + data_size, limits or AdapterLimits())


def test_reads_entries_by_position_whatever_their_order_in_the_header() -> None:
    entries = parse({"__metadata__": {"format": "pt"}, "b": tensor(8, 12), "a": tensor(0, 8)}, 12)
    assert [(entry.name, entry.shape, entry.size_bytes) for entry in entries] == [("a", (2,), 8), ("b", (1,), 4)]
    assert entries[1].start - entries[0].start == 8


def test_accepts_a_header_padded_with_spaces_and_empty_tensors() -> None:
    header = json.dumps({"a": tensor(0, 4), "empty": tensor(4, 4, shape=[0, 3])}).encode() + b"   "
    assert [entry.name for entry in parse(header, 4)] == ["a", "empty"]


def test_the_first_eight_bytes_give_the_end_of_the_header() -> None:
    data = safetensors_bytes({"a": ("F32", [1], bytes(4))})
    needed = header_end(data[:8], len(data))
    assert needed == len(data) - 4
    assert parse_header(data[:needed], len(data))[0].name == "a"


@pytest.mark.parametrize(
    ("header", "data_size", "code"),
    [
        ({"a": tensor(0, 8), "b": tensor(4, 12)}, 12, "bad_safetensors"),
        ({"a": tensor(0, 4), "b": tensor(8, 12)}, 12, "bad_safetensors"),
        ({"a": tensor(4, 8)}, 8, "bad_safetensors"),
        ({"a": tensor(0, 8)}, 12, "bad_safetensors"),
        ({"a": tensor(0, 8)}, 4, "bad_safetensors"),
        ({"a": tensor(0, 8, shape=[3])}, 8, "bad_safetensors"),
        ({"a": tensor(0, 8, shape=[-2])}, 8, "bad_safetensors"),
        ({"a": tensor(0, 8, shape=[2.0])}, 8, "bad_safetensors"),  # type: ignore[list-item]
        ({"a": tensor(0, 4, shape=[True])}, 4, "bad_safetensors"),
        ({"a": tensor(0, 4, shape=[1] * 9)}, 4, "bad_safetensors"),
        ({"a": tensor(0, 0, shape=[2**63])}, 0, "bad_safetensors"),
        ({"a": tensor(0, 0, shape=[2**62, 2**62])}, 0, "bad_safetensors"),
        ({"a": tensor(8, 4, shape=[1])}, 8, "bad_safetensors"),
        ({"a": {**tensor(0, 4), "extra": 1}}, 4, "bad_safetensors"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "bad_safetensors"),
        ({"a": [1]}, 4, "bad_safetensors"),
        ({"a": tensor(0, 4, dtype="F128")}, 4, "bad_dtype"),
        ({"a": {**tensor(0, 4), "dtype": ["F32"]}}, 4, "bad_dtype"),
        ({"a": {**tensor(0, 4), "data_offsets": [0, 4, 8]}}, 4, "bad_safetensors"),
        ({"a": {**tensor(0, 4), "data_offsets": "04"}}, 4, "bad_safetensors"),
        ({"__metadata__": {"a": 1}}, 0, "bad_safetensors"),
        ({"__metadata__": ["a"]}, 0, "bad_safetensors"),
        ({"__metadata__": {"a": {"b": {"c": "d"}}}}, 0, "bad_safetensors"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 2 + b"}", 4, "bad_safetensors"),
        (b'{"a":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}', 4, "duplicate_tensor"),
        (b'{"__metadata__":{},"__metadata__":{}}', 0, "duplicate_tensor"),
        (b"[1]", 0, "bad_safetensors"),
        (b" {}", 0, "bad_safetensors"),
        (b"", 0, "bad_safetensors"),
        (b'{"a":NaN}', 0, "bad_safetensors"),
        (b'{"a":' + b"9" * 5000 + b"}", 0, "bad_safetensors"),
        (b'{"a":' + b"[" * 100_000 + b"}", 0, "bad_safetensors"),
        (b'{"\\ud800":1}', 0, "bad_safetensors"),
        (b'{"\xff":1}', 0, "bad_safetensors"),
    ],
)
def test_refuses_hostile_headers(header: object, data_size: int, code: str) -> None:
    with pytest.raises(AdapterError) as refused:
        parse(header, data_size)
    assert refused.value.code == code
    assert refused.value.file == "adapter_model.safetensors"


def test_refuses_a_tensor_name_that_occurs_twice() -> None:
    one = json.dumps(tensor(0, 4))
    with pytest.raises(AdapterError, match='"a" occurs twice') as refused:
        parse(f'{{"a":{one},"a":{one}}}'.encode(), 4)
    assert refused.value.code == "duplicate_tensor"


def test_refuses_one_tensor_too_many() -> None:
    fits = {f"t{index}": tensor(0, 0) for index in range(65_536)}
    assert len(parse(fits)) == 65_536
    with pytest.raises(AdapterError, match="65536 tensors") as refused:
        parse({**fits, "one_more": tensor(0, 0)})
    assert refused.value.code == "too_large"


def test_refuses_many_non_tensor_objects_before_building_them() -> None:
    with pytest.raises(AdapterError) as refused:
        parse(b'{"a":[' + b"{}," * 100_000 + b"{}]}")
    assert refused.value.code == "too_large"


def test_refuses_a_header_or_file_over_the_limits_from_the_first_bytes() -> None:
    with pytest.raises(AdapterError, match="16777216") as refused:
        header_end(struct.pack("<Q", 16 * 1024 * 1024 + 1), 2**31)
    assert refused.value.code == "too_large"
    with pytest.raises(AdapterError) as refused:
        header_end(struct.pack("<Q", 100), 4 * 1024**3 + 1)
    assert refused.value.code == "too_large"
    with pytest.raises(AdapterError) as refused:
        header_end(struct.pack("<Q", 2**64 - 1), 1000)
    assert refused.value.code == "too_large"
    with pytest.raises(AdapterError) as refused:
        header_end(struct.pack("<Q", 993), 1000)
    assert refused.value.code == "bad_safetensors"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_parsed_or_refused(data: bytes, file_size: int) -> None:
    with contextlib.suppress(AdapterError):
        parse_header(data, file_size)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["F32", "BF16"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), json_values, max_size=4), st.integers(0, 16))
def test_any_json_header_is_parsed_or_refused(header: dict, data_size: int) -> None:
    with contextlib.suppress(AdapterError):
        parse(header, data_size)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_header_is_parsed_or_refused(data: st.DataObject) -> None:
    good = bytearray(safetensors_bytes({"a": ("F32", [2, 1], bytes(8)), "b": ("BF16", [1], bytes(2))}, {"k": "v"}))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    size = len(good) + data.draw(st.integers(-4, 4))
    try:
        entries = parse_header(bytes(good), size)
    except AdapterError:
        return
    assert sum(entry.size_bytes for entry in entries) + header_end(bytes(good), size) == size


def test_reads_large_tensors_in_blocks_of_rows(tmp_path: Path) -> None:
    values = np.arange(3000 * 1024, dtype=np.float32).reshape(3000, 1024)
    data = safetensors_bytes({"a": ("F32", [1], bytes(4)), "b": ("F32", values.shape, values.tobytes())})
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    with open_weights(tmp_path) as weights:
        blocks = list(weights.row_blocks(weights.tensors["b"]))
    assert [first for first, _ in blocks] == [0, 1024, 2048]
    assert np.array_equal(np.concatenate([block for _, block in blocks]), values)


def test_notices_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(safetensors_bytes({"a": ("F32", [4, 4], bytes(64))}))
    with open_weights(tmp_path) as weights:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 8)
        with pytest.raises(AdapterError) as refused:
            list(weights.row_blocks(weights.tensors["a"]))
    assert refused.value.code == "file_changed"


def test_refuses_a_pickle_and_asks_for_safetensors(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(AdapterError, match="safetensors") as refused, open_weights(tmp_path):
        pass
    assert refused.value.code == "missing_file"

import dataclasses
import errno
import fcntl
import json
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from loraserve_adapters import packed_file, sync_file
from loraserve_adapters.base_layout import BaseModule
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.pack import pack
from loraserve_adapters.packed import PackedAdapter, PackedTable
from loraserve_adapters.packed_file import PAGE_BYTES, layout_fingerprint, read_packed, write_packed
from loraserve_adapters.source import read_adapter

from tests.unit.adapters.folders import config_of, lora_tensors, tiny_layout, with_magnitudes, write_folder


@pytest.fixture
def packed(tmp_path: Path) -> PackedAdapter:
    return make_packed(tmp_path / "lora")


@pytest.fixture
def packed_dora(tmp_path: Path) -> PackedAdapter:
    return make_packed(tmp_path / "dora", use_dora=True)


def make_packed(folder: Path, *, use_dora: bool = False) -> PackedAdapter:
    layout = tiny_layout()
    config = config_of(lora_alpha=3, target_modules=["q_proj", "lm_head"], use_dora=use_dora)
    tensors = lora_tensors(layout, ["q_proj", "lm_head"])
    source = read_adapter(write_folder(folder, config, with_magnitudes(tensors) if use_dora else tensors), layout)
    pack(source, layout, folder / "source.packed")
    return read_packed(folder / "source.packed")


@pytest.mark.parametrize("kind", ["packed", "packed_dora"])
def test_reads_back_what_was_written_as_a_read_only_mapping(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    packed, path = request.getfixturevalue(kind), tmp_path / "a.packed"
    write_packed(packed, path)
    read = read_packed(path, layout_fingerprint=packed.table.layout_fingerprint)
    assert read.digest == packed.digest
    assert read.payload.dtype == packed.payload.dtype
    assert np.array_equal(read.payload, packed.payload)
    for field in dataclasses.fields(PackedTable):
        expected, found = getattr(packed.table, field.name), getattr(read.table, field.name)
        if isinstance(expected, np.ndarray):
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)
        else:
            assert found == expected
    assert isinstance(read.payload, np.memmap)
    assert not read.payload.flags.writeable
    assert (path.stat().st_size - read.size_bytes) % PAGE_BYTES == 0


def test_only_files_with_magnitudes_have_a_newer_version(
    packed: PackedAdapter, packed_dora: PackedAdapter, tmp_path: Path
) -> None:
    """Earlier releases read plain files and refuse those with magnitudes, which they would compute as plain LoRA."""
    found = []
    for adapter in (packed, packed_dora):
        write_packed(adapter, tmp_path / "a.packed")
        data = (tmp_path / "a.packed").read_bytes()
        _, version, length, _ = packed_file._PREFIX.unpack_from(data)
        header = json.loads(data[packed_file._PREFIX.size :][:length])
        found.append((version, header.get("offset_magnitude"), (adapter.table.offset_magnitude >= 0).sum()))
    assert found == [(2, None, 0), (3, packed_dora.table.offset_magnitude.tolist(), 3)]
    assert packed.table.offset_magnitude.tolist() == [-1] * len(packed.table.offset_b)


def test_refuses_files_with_damaged_or_missing_bytes(packed: PackedAdapter, tmp_path: Path) -> None:
    path = tmp_path / "a.packed"
    write_packed(packed, path)
    good = path.read_bytes()
    payload_start = len(good) - packed.size_bytes
    for position in [*range(60), 200, payload_start, payload_start + 1000, len(good) - 1]:
        damaged = bytearray(good)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(AdapterError) as refused:
            read_packed(path)
        assert refused.value.code == "bad_packed_file"
    for size in [0, 20, 48, 300, payload_start, len(good) - 1]:
        path.write_bytes(good[:size])
        with pytest.raises(AdapterError) as refused:
            read_packed(path, verify=False)
        assert refused.value.code == "bad_packed_file"


def test_refuses_the_file_of_another_layout(packed: PackedAdapter, tmp_path: Path) -> None:
    write_packed(packed, tmp_path / "a.packed")
    with pytest.raises(AdapterError) as refused:
        read_packed(tmp_path / "a.packed", layout_fingerprint="0" * 64)
    assert refused.value.code == "layout_mismatch"
    with pytest.raises(AdapterError) as refused:
        read_packed(tmp_path / "b.packed")
    assert refused.value.code == "missing_file"


@pytest.mark.parametrize("is_replaced", [False, True])
def test_maps_the_file_whose_header_it_read_even_if_the_path_changes(
    packed: PackedAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    path, other = tmp_path / "a.packed", tmp_path / "b.packed"
    write_packed(packed, path)
    write_packed(dataclasses.replace(packed, payload=np.zeros_like(packed.payload)), other)
    read_header = packed_file._read_header

    def then_change_path(file: BinaryIO, path: Path) -> object:
        header = read_header(file, path)
        other.replace(path) if is_replaced else path.unlink()
        return header

    monkeypatch.setattr(packed_file, "_read_header", then_change_path)
    assert np.array_equal(read_packed(path).payload, packed.payload)


def test_a_file_that_cannot_be_mapped_is_refused_as_unreadable(
    packed: PackedAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    write_packed(packed, tmp_path / "a.packed")
    monkeypatch.setattr(np, "memmap", fail)
    with pytest.raises(AdapterError, match=r"a\.packed cannot be read: Cannot allocate memory"):
        read_packed(tmp_path / "a.packed")


@pytest.mark.parametrize(("error", "num_fsyncs"), [(None, 0), (errno.ENOTSUP, 2)])
def test_on_macos_the_drive_cache_is_flushed_or_fsync_is_used_if_that_is_unsupported(
    packed: PackedAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None, num_fsyncs: int
) -> None:
    calls: list[str] = []

    def fcntl_of_macos(descriptor: int, command: int) -> None:
        calls.append("full")
        if error is not None:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(sync_file, "_F_FULLFSYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", fcntl_of_macos)
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    write_packed(packed, tmp_path / "a.packed")
    assert (calls.count("full"), calls.count("fsync")) == (2, num_fsyncs)


def test_leaves_nothing_behind_when_writing_fails(
    packed: PackedAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    cache_dir = tmp_path / "cache"
    cache_dir.mkdir()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_packed(packed, cache_dir / "a.packed")
    assert not list(cache_dir.iterdir())


def test_fingerprints_distinguish_layouts() -> None:
    def fingerprint(*groups: tuple[BaseModule, ...], dtype: str = "float32") -> str:
        return layout_fingerprint(groups, dtype)

    a, b = BaseModule("a", 2, 3), BaseModule("b", 2, 3)
    different = {
        fingerprint((a,), (b,)),
        fingerprint((a, b)),
        fingerprint((b, a)),
        fingerprint((a,), (b,), dtype="bfloat16"),
        fingerprint((a,), (BaseModule("b", 3, 2),)),
        fingerprint((a,), (BaseModule("b", 2, 3, "00"),)),
    }
    assert len(different) == 6
    assert fingerprint((a, b)) == fingerprint((BaseModule("a", 2, 3), BaseModule("b", 2, 3)))

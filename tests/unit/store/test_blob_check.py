from pathlib import Path

import pytest
from loraserve_adapters.source import read_adapter

from loraserve.store.blob_check import verify_blob
from loraserve.store.blobs import BlobStore
from loraserve.store.errors import BlobMissingError, DamagedFileError
from tests.unit.adapters.folders import config_of, lora_tensors, tiny_layout, write_folder

LAYOUT = tiny_layout()
TARGETS = ["q_proj", "v_proj"]


@pytest.fixture
def published(tmp_path: Path) -> tuple[BlobStore, str, Path]:
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    write_folder(prepared, config_of(target_modules=TARGETS), lora_tensors(LAYOUT, TARGETS))
    digest = read_adapter(prepared, LAYOUT).digest
    (prepared / "manifest.json").write_text("{}")
    blobs = BlobStore(tmp_path / "data")
    assert blobs.publish(prepared, digest)
    folder = blobs.folder(digest)
    assert folder is not None
    return blobs, digest, folder


def test_what_was_published_is_what_its_name_says(published: tuple[BlobStore, str, Path]) -> None:
    blobs, digest, _ = published
    verify_blob(blobs, digest)


def test_one_flipped_bit_is_found(published: tuple[BlobStore, str, Path]) -> None:
    blobs, digest, folder = published
    weights = folder / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DamagedFileError, match="holds the content"):
        verify_blob(blobs, digest)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_torn_or_missing_file_is_found(published: tuple[BlobStore, str, Path], name: str) -> None:
    blobs, digest, folder = published
    (folder / name).write_bytes((folder / name).read_bytes()[:20])
    with pytest.raises(DamagedFileError):
        verify_blob(blobs, digest)
    (folder / name).unlink()
    with pytest.raises(DamagedFileError):
        verify_blob(blobs, digest)


def test_content_that_is_not_there_is_named(published: tuple[BlobStore, str, Path]) -> None:
    with pytest.raises(BlobMissingError, match="0" * 64):
        verify_blob(published[0], "0" * 64)

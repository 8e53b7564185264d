"""Reads content back and compares it with its name."""

import hashlib
from pathlib import Path

from loraserve_adapters.config import read_config
from loraserve_adapters.digest import HashedTensor, adapter_digest
from loraserve_adapters.dtypes import FROM_SAFETENSORS, raw_bytes
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.safetensors_file import SafetensorsFile, TensorEntry, open_weights

from loraserve.store.blobs import BlobStore
from loraserve.store.errors import BlobMissingError, DamagedFileError


def verify_blob(blobs: BlobStore, digest: str) -> None:
    """Every bit that decides the computation is as it was published; reads all of it.

    Raises `BlobMissingError` or `DamagedFileError`.
    """
    folder = blobs.folder(digest)
    if folder is None:
        raise BlobMissingError(digest)
    try:
        found = _digest_of(folder)
    except AdapterError as error:
        raise DamagedFileError(folder, error.message) from None
    if found != digest:
        raise DamagedFileError(folder, f"holds the content {found}")


def _digest_of(folder: Path) -> str:
    config = read_config(folder)
    with open_weights(folder) as weights:
        return adapter_digest(config, [_hashed(weights, entry) for entry in weights.tensors.values()])


def _hashed(weights: SafetensorsFile, entry: TensorEntry) -> HashedTensor:
    if entry.dtype not in FROM_SAFETENSORS or len(entry.shape) not in (1, 2):
        raise AdapterError("bad_dtype", f"tensor {entry.name!r} is no LoRA weight: {entry.dtype} {list(entry.shape)}")
    digest = hashlib.sha256()
    for _, block in weights.row_blocks(entry):
        digest.update(raw_bytes(block))
    return HashedTensor(entry, digest.digest())

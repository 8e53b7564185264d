"""The stored content of versions: config and weights as kept, and what validation found.

The config is rewritten from its parsed fields, and so are the weights unless they are already as safetensors writes
them. The meaning of both, and thus the digest, is that of the upload.
"""

import asyncio
import logging
from pathlib import Path

import msgspec

from loraserve.control.ingest.manifest import Manifest
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.blobs import MANIFEST_FILE, BlobStore

logger = logging.getLogger(__name__)


class Contents:
    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._decoder = msgspec.json.Decoder(Manifest)

    def file(self, digest: str, name: str) -> Path:
        """name: one of `BLOB_FILES`. Raises `ServingError`."""
        folder = self._blobs.folder(digest)
        if folder is None or not (folder / name).is_file():
            logger.error("the content %s is not in the data directory, or lacks its %s", digest, name)
            message = "The files of this version are gone from the server's disk. Upload them again."
            raise ServingError(ErrorCode.ADAPTER_UNREADABLE, message)
        return folder / name

    async def manifest(self, digest: str) -> Manifest:
        """Raises `ServingError`."""
        path = self.file(digest, MANIFEST_FILE)
        try:
            return self._decoder.decode(await asyncio.to_thread(path.read_bytes))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.error("%s is damaged: %s", path, error)
            message = "The record of this version's validation is damaged on the server's disk. Upload its files again."
            raise ServingError(ErrorCode.ADAPTER_UNREADABLE, message) from None

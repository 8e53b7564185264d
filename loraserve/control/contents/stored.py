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
        if folder is None:
            logger.error("the content %s is not in the data directory", digest)
            message = "The files of this version are gone from the server's disk. Upload them again."
            raise ServingError(ErrorCode.ADAPTER_UNREADABLE, message)
        return folder / name

    async def manifest(self, digest: str) -> Manifest:
        """Raises `ServingError`."""
        body = await asyncio.to_thread(self.file(digest, MANIFEST_FILE).read_bytes)
        return self._decoder.decode(body)

"""Loads one content into the engine; packs it again if its packed file is lost, damaged or for another base."""

import asyncio
import logging
from pathlib import Path

from loraserve.control.ingest.processes import DamagedFilesError, DoesNotFitError, Ingest, IngestError
from loraserve.control.names.served_base import does_not_fit
from loraserve.serving.engine_client import AdapterLoadError, EngineClient, EngineDeadError
from loraserve.serving.engine_errors import engine_dead
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.blobs import BlobStore

PACK_RETRY_AFTER_S = 5

logger = logging.getLogger(__name__)


class ContentLoader:
    """Called on the event loop, by at most one caller per digest at a time."""

    def __init__(self, engine: EngineClient, blobs: BlobStore, ingest: Ingest, base_name: str) -> None:
        """base_name: name of the served base."""
        self._engine = engine
        self._blobs = blobs
        self._ingest = ingest
        self._base_name = base_name

    async def load(self, digest: str, *, repack: bool = False) -> int:
        """Returns the size of the packed file. Raises `ServingError`: the content is gone or damaged, does not fit the
        base, cannot be packed now (503), the engine refuses it or is dead.

        repack: make the packed file again, even if it looks intact.
        """
        path = self._ingest.packed_path(digest)
        size_bytes = None if repack else await asyncio.to_thread(_size_of, path)
        if size_bytes is not None:
            try:
                await self._load_packed(digest, path)
                return size_bytes
            except AdapterLoadError as error:
                # The packed file is a cache: it is written again from the content itself.
                logger.warning("the packed file of %s is unusable (%s) and will be rebuilt", digest[:12], error)
        await self._pack(digest)
        try:
            await self._load_packed(digest, path)
        except AdapterLoadError as error:
            raise ServingError(ErrorCode.ADAPTER_INVALID, f"The engine refuses the adapter: {error}.") from error
        return await asyncio.to_thread(_size_of, path) or 0

    async def _load_packed(self, digest: str, path: Path) -> None:
        try:
            await self._engine.load(digest, str(path))
        except EngineDeadError as error:
            raise engine_dead() from error

    async def _pack(self, digest: str) -> None:
        folder = await asyncio.to_thread(self._blobs.folder, digest)
        if folder is None:
            raise _unreadable(digest, "its files are gone")
        try:
            await self._ingest.pack(digest, folder)
        except DoesNotFitError as error:
            raise does_not_fit(self._base_name, error.reason) from error
        except DamagedFilesError as error:
            raise _unreadable(digest, str(error)) from error
        except (IngestError, OSError) as error:
            raise _not_now(digest, str(error)) from error


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _not_now(digest: str, reason: str) -> ServingError:
    logger.error("adapter content %s cannot be packed now: %s", digest, reason)
    message = "The server cannot prepare the adapter now; its log says why. Retry in a few seconds."
    return ServingError(ErrorCode.SERVICE_UNAVAILABLE, message, retry_after_s=PACK_RETRY_AFTER_S)


def _unreadable(digest: str, reason: str) -> ServingError:
    logger.error("adapter content %s cannot be loaded: %s", digest, reason)
    message = "The adapter's files on this server cannot be read. Upload it again; the server's log says why."
    return ServingError(ErrorCode.ADAPTER_UNREADABLE, message)

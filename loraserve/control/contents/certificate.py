"""How far the served model's answers with an adapter are from PEFT's: measured once, after the adapter is ready.

The measurement runs in a process of its own, with the lowest priority and one thread, one adapter at a time, and only
if memory allows. Neither torch nor PEFT is imported here.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from loraserve.control.ingest.processes import Ingest, IngestError
from loraserve.engine.config import EngineConfig
from loraserve.serving.process.our_modules import module_command, python_environment
from loraserve.store.blobs import BlobStore
from loraserve.store.durable import replace_file

MEMORY_FACTOR = 2.5
"""Free memory needed, as a multiple of the base weights: the engine's copy, then PEFT's while the first is being freed,
and work space."""
TIMEOUT_S = 1800.0
MAX_WAITING = 1024

_logger = logging.getLogger(__name__)


class CertificateStatus(StrEnum):
    AGREES = "agrees"
    DIFFERS = "differs"
    """By more than rounding explains."""
    SKIPPED = "skipped"
    """Nothing is known; the reason says why."""


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    status: CertificateStatus
    reason: str | None = None
    """When skipped."""
    largest_difference: float | None = None
    """Between our log-probability and PEFT's, over all tokens and positions."""
    relative_difference: float | None = None
    """The same as a share of the largest |logit|; compared with `tolerance`."""
    tolerance: float | None = None
    num_positions: int = 0
    """Positions at which the whole vocabulary was compared."""
    base_fingerprint: str
    peft_version: str | None = None
    measured_at: float
    """Unix time."""


class CertificateJob(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    blob: str
    """Path of the folder."""
    packed_path: str
    base_fingerprint: str
    engine: EngineConfig
    """Its device is the one in use, not `auto`."""
    memory_factor: float = MEMORY_FACTOR


class Certifier:
    """Called on the event loop. `run` does the work; until it runs, queued digests wait."""

    def __init__(
        self,
        blobs: BlobStore,
        ingest: Ingest,
        *,
        base_fingerprint: Callable[[], str],
        engine: EngineConfig,
        timeout_s: float = TIMEOUT_S,
        command: Sequence[str] = module_command("loraserve.control.contents.certificate_child"),
    ) -> None:
        """engine: the configuration of the serving engine."""
        self._blobs = blobs
        self._ingest = ingest
        self._base_fingerprint = base_fingerprint
        self._engine = engine
        self._timeout_s = timeout_s
        self._command = command
        self._waiting: asyncio.Queue[str] = asyncio.Queue(MAX_WAITING)
        self._queued: set[str] = set()
        """Digests that wait or are being measured."""

    def queue(self, digest: str) -> None:
        """Never raises. A queued digest keeps its place; one that finds the queue full is left out."""
        if digest not in self._queued and not self._waiting.full():
            self._queued.add(digest)
            self._waiting.put_nowait(digest)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            digest = await self._waiting.get()
            try:
                await self.certify(digest)
            except OSError:
                _logger.exception("the certificate of %s could not be stored", digest[:12])
            finally:
                self._queued.discard(digest)

    def of(self, digest: str) -> Certificate | None:
        """For the base model that is served now; None if it was not measured yet. Reads a small file."""
        path = self._path(digest)
        if path is None or not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=Certificate)
        except msgspec.DecodeError:
            return None

    async def certify(self, digest: str) -> Certificate | None:
        """Measure and store; an earlier measurement is kept. None if the content is gone."""
        known = await asyncio.to_thread(self.of, digest)
        if known is not None and known.status is not CertificateStatus.SKIPPED:
            return known
        blob = self._blobs.folder(digest)
        if blob is None:
            return None
        packed_path = self._ingest.packed_path(digest)
        job = CertificateJob(
            digest=digest,
            blob=str(blob),
            packed_path=str(packed_path),
            base_fingerprint=self._base_fingerprint(),
            engine=self._engine,
        )
        try:
            # It may be lost, or made for an earlier base: usually it is then made again at the adapter's next use.
            if not packed_path.exists():
                await self._ingest.pack(digest, blob)
            certificate = await self._measure(job)
        except IngestError as error:
            certificate = skipped(job, str(error))
        path = self._path(digest)
        if path is not None:
            await asyncio.to_thread(replace_file, path, msgspec.json.encode(certificate))
        return certificate

    def _path(self, digest: str) -> Path | None:
        """Servers that share a directory may have the base model in different forms."""
        blob, quantization = self._blobs.folder(digest), self._engine.quantization
        form = "" if quantization == "none" else f"-{quantization}"
        return None if blob is None else blob / f"certificate-{self._base_fingerprint()[:16]}{form}.json"

    async def _measure(self, job: CertificateJob) -> Certificate:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                **python_environment(),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            },
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, errors = await process.communicate(msgspec.json.encode(job))
        except TimeoutError:
            return skipped(job, f"it took longer than {self._timeout_s:g} s")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode != 0:
            _logger.warning(
                "the certificate of %s failed: %s", job.digest[:12], errors[-4096:].decode(errors="replace")
            )
            return skipped(job, "the measurement failed; the server's log says why")
        # The last line: libraries may print anything before it.
        return msgspec.json.decode(answer.rstrip().rpartition(b"\n")[2], type=Certificate)


def skipped(job: CertificateJob, reason: str) -> Certificate:
    return Certificate(
        status=CertificateStatus.SKIPPED,
        reason=reason,
        base_fingerprint=job.base_fingerprint,
        measured_at=time.time(),
    )

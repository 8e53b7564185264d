"""Keeps pinned adapters in the memory tier that their pins request, on this engine."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from loraserve.control.contents.residency import Residency
from loraserve.control.documents.adapter_edits import alias_versions, find_version
from loraserve.control.documents.catalog import Catalog
from loraserve.control.names.served_base import fits
from loraserve.engine.config import MAX_RESIDENT_ADAPTERS
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.serving.engine_client import EngineClient, EngineDeadError
from loraserve.serving.errors import NO_RETRY, ErrorCode, ServingError
from loraserve.store.records import LIVE_ALIAS, AdapterDoc, AnyDocument, BaseRecord, Pin, Tier

CHECK_EVERY_S = 5.0
MAX_CHECKS_BETWEEN_TRIES = 60
"""5 minutes. Content that cannot be loaded, for example because its files are gone, is retried less and less often."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Failure:
    """A content could not be loaded or warmed."""

    num_checks: int
    """Between the last try and the next."""
    num_checks_left: int


class Pins:
    """Called on the event loop; `run` as a task.

    `host`: loaded, and never unloaded in favor of others. `device`: also brought back into the engine's arena, by
    generating one token, whenever others evicted it. If these exceed the arena, the rest is treated as pinned to
    `host`; otherwise they would evict each other forever.
    """

    def __init__(
        self,
        catalog: Catalog,
        residency: Residency,
        engine: EngineClient,
        base: BaseRecord,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._catalog = catalog
        self._residency = residency
        self._engine = engine
        self._base = base
        self._clock = clock
        self._left_out: set[str] = set()
        """Digests that did not fit into the arena."""
        self._failures: dict[str, _Failure] = {}
        """By digest; removed when a try succeeds."""
        self._changed = asyncio.Event()
        catalog.subscribe(self._on_change)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._changed.clear()
            await self.keep()
            try:
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def keep(self) -> None:
        """Load and warm what is pinned now. Failures are logged and retried after 1, 2, 4, ... further checks, or at
        the next check if the adapter's document changed."""
        wanted = self._wanted()
        self._failures = {digest: failure for digest, failure in self._failures.items() if digest in wanted}
        self._residency.pin(frozenset(wanted))
        loaded = [
            digest
            for digest in wanted
            if self._residency.is_loaded(digest) or await self._try(digest, self._residency.load)
        ]
        for digest in self._fitting([digest for digest in loaded if wanted[digest] is Tier.DEVICE]):
            if not self._residency.is_on_device(digest):
                await self._try(digest, self._warm)

    def check_room(self, doc: AdapterDoc) -> None:
        """Whether the arena has room for what `doc` pins to the device, besides what is pinned there already.

        doc: with its new pin. Content that was never loaded here counts as 0 bytes. Raises `ServingError` (409).
        """
        if doc.pin is None or doc.pin.tier is not Tier.DEVICE:
            return
        pinned = {digest for digest, tier in self._wanted().items() if tier is Tier.DEVICE}
        size_bytes = sum(map(self._size_bytes, self._live_digests(doc) - pinned))
        limit_bytes = self._engine.model.arena_size_bytes
        if 0 < size_bytes > limit_bytes - sum(map(self._size_bytes, pinned)):
            message = (
                f"The adapter '{doc.name}' takes {size_bytes} bytes, but of the {limit_bytes} bytes of adapter memory "
                f"the pinned adapters leave less than that. Unpin others, or pin it to '{Tier.HOST}'."
            )
            raise ServingError(ErrorCode.CONFLICT, message, headers=NO_RETRY)

    def _fitting(self, digests: list[str]) -> list[str]:
        """Those that fit into the arena together, taken in order. They must be loaded."""
        fitting: list[str] = []
        room_bytes = self._engine.model.arena_size_bytes
        for digest in digests:
            size_bytes = self._size_bytes(digest)
            if size_bytes <= room_bytes and len(fitting) < MAX_RESIDENT_ADAPTERS:
                room_bytes -= size_bytes
                fitting.append(digest)
        left_out = {*digests} - {*fitting}
        for digest in left_out - self._left_out:
            logger.warning("the adapter memory has no room for the pinned adapter content %s", digest[:12])
        self._left_out = left_out
        return fitting

    def _size_bytes(self, digest: str) -> int:
        """Size of its packed file, which is barely larger than its share of the arena."""
        return self._residency.of(digest).packed_bytes or 0

    async def _try(self, digest: str, work: Callable[[str], Coroutine[None, None, None]]) -> bool:
        """Whether `work` was tried and succeeded. It is not tried while a retry is not due."""
        failure = self._failures.get(digest)
        if failure is not None and failure.num_checks_left > 1:
            failure.num_checks_left -= 1
            return False
        try:
            await work(digest)
        except (ServingError, EngineDeadError) as error:
            num_checks = 1 if failure is None else min(2 * failure.num_checks, MAX_CHECKS_BETWEEN_TRIES)
            self._failures[digest] = _Failure(num_checks, num_checks)
            logger.warning("the pinned adapter content %s cannot be kept in memory: %s", digest[:12], error)
            return False
        self._failures.pop(digest, None)
        return True

    def _wanted(self) -> dict[str, Tier]:
        now = self._clock()
        wanted: dict[str, Tier] = {}
        for document in self._catalog.all_adapters():
            pin = pin_at(document.doc, now)
            if pin is None:
                continue
            for digest in self._live_digests(document.doc):
                wanted[digest] = Tier.DEVICE if Tier.DEVICE in (pin.tier, wanted.get(digest)) else pin.tier
        return wanted

    def _live_digests(self, doc: AdapterDoc) -> set[str]:
        """Without versions that were made for other bases."""
        found = (find_version(doc, number) for number in live_numbers(doc))
        return {version.digest for version in found if version is not None and fits(version, self._base)}

    async def _warm(self, digest: str) -> None:
        request = EngineRequest(
            request_id=f"warm-{secrets.token_hex(8)}",
            prompt_token_ids=[0],
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            adapter_digest=digest,
            cache_salt=secrets.token_hex(16),
        )
        async with self._residency.hold(digest):
            async for _ in self._engine.generate(request):
                pass

    def _on_change(self, document: AnyDocument) -> None:
        if isinstance(document.doc, AdapterDoc) and document.doc.pin is not None:
            for digest in self._live_digests(document.doc):
                self._failures.pop(digest, None)
            self._changed.set()


def pin_at(doc: AdapterDoc, now: float) -> Pin | None:
    """The pin in effect; None once it has expired, which changes no document, or if the adapter is deleted."""
    if doc.pin is None or doc.deleted_at is not None:
        return None
    return doc.pin if doc.pin.until is None or now < doc.pin.until else None


def live_numbers(doc: AdapterDoc) -> set[int]:
    """Numbers of the versions that the bare name means, including a canary: those that a pin keeps."""
    alias = doc.aliases.get(LIVE_ALIAS)
    return set() if alias is None else alias_versions(alias)

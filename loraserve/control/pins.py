"""Keeps pinned adapters where their pins want them, on this engine."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from loraserve.control.adapter_edits import find_version
from loraserve.control.catalog import Catalog
from loraserve.control.residency import Residency
from loraserve.control.served_base import fits
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.serving.engine_client import EngineClient, EngineDeadError
from loraserve.serving.errors import ServingError
from loraserve.store.records import LIVE_ALIAS, AdapterDoc, AnyDocument, BaseRecord, Tier

CHECK_EVERY_S = 5.0

logger = logging.getLogger(__name__)


class Pins:
    """Called on the event loop; `run` as a task.

    `host`: loaded, and never given up for others. `device`: also brought into the engine's arena again, by one token of
    generation, whenever others drove it out.
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
        """Load and warm what is pinned now. What cannot be is logged and tried again the next time."""
        wanted = self._wanted()
        self._residency.pin(frozenset(wanted))
        for digest, tier in wanted.items():
            try:
                if tier is Tier.DEVICE and not self._residency.is_on_device(digest):
                    await self._warm(digest)
                elif not self._residency.is_loaded(digest):
                    await self._residency.load(digest)
            except (ServingError, EngineDeadError) as error:
                logger.warning("the pinned adapter content %s cannot be kept in memory: %s", digest[:12], error)

    def _wanted(self) -> dict[str, Tier]:
        now = self._clock()
        wanted: dict[str, Tier] = {}
        for document in self._catalog.all_adapters():
            doc = document.doc
            if doc.pin is None or doc.pin.until <= now or doc.deleted_at is not None:
                continue
            for digest in _live_digests(doc, self._base):
                wanted[digest] = Tier.DEVICE if Tier.DEVICE in (doc.pin.tier, wanted.get(digest)) else doc.pin.tier
        return wanted

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
            self._changed.set()


def _live_digests(doc: AdapterDoc, base: BaseRecord) -> set[str]:
    """What the bare name means, a canary included; without what was made for other bases."""
    alias = doc.aliases.get(LIVE_ALIAS)
    if alias is None:
        return set()
    numbers = [alias.version] if alias.canary is None else [alias.version, alias.canary.version]
    found = (find_version(doc, number) for number in numbers)
    return {version.digest for version in found if version is not None and fits(version, base)}

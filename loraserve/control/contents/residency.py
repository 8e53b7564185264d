"""Which contents the engine has, by digest: loaded at first use, unloaded when no document refers to them any more."""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, field, replace

from loraserve.control.background import Tasks
from loraserve.control.contents.loader import ContentLoader
from loraserve.control.contents.uses import ContentUses
from loraserve.control.contents.wanted import WantedContents
from loraserve.control.documents.catalog import Catalog
from loraserve.control.turns import Turns
from loraserve.engine.request import EngineStats
from loraserve.serving.engine_client import EngineClient, EngineDeadError
from loraserve.store.records import Tier

MAX_LOADED = 4096
"""Contents the engine knows at once; each costs it a path and, while it is used, a mapping."""


@dataclass(frozen=True, slots=True)
class DigestResidency:
    """How close one content is to this server's engine, and how much it is used."""

    digest: str
    tier: Tier
    packed_bytes: int | None
    """None until this process loaded it."""
    last_used_at: float | None
    """Unix time; since the start of this process."""
    num_hits: int
    """Requests since the start of this process."""
    load_ms: float | None
    """Duration of its last load, including packing if that was needed."""
    num_references: int
    """Requests that use it now."""


@dataclass(slots=True)
class _Entry:
    is_loaded: bool = False
    is_unloading: bool = False
    """The engine was told to forget it and has not confirmed yet."""
    is_damaged: bool = False
    """The engine has found its packed file damaged."""
    num_references: int = 0
    num_hits: int = 0
    packed_bytes: int | None = None
    last_used_at: float | None = None
    load_ms: float | None = None
    unloaded: asyncio.Event = field(default_factory=asyncio.Event)


class Residency:
    """Called on the event loop. Calls for one digest take turns; others do not wait for them.

    NOTE: the engine is told to forget a content only while nothing references it, and from that moment on it counts as
    not loaded; so for a caller inside `hold`, the engine has the content.
    """

    def __init__(
        self,
        engine: EngineClient,
        loader: ContentLoader,
        catalog: Catalog,
        *,
        max_loaded: int = MAX_LOADED,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._loader = loader
        self._max_loaded = max_loaded
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._num_loaded = 0
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Loaded contents that nothing references and no pin keeps, least recently used first."""
        self._pinned: frozenset[str] = frozenset()
        self._turns = Turns()
        self._unloading = Tasks()
        self._on_device_of: tuple[EngineStats, frozenset[str]] | None = None
        self._uses = ContentUses()
        self._wanted = WantedContents(catalog, self._retire_if_unwanted, clock=clock)

    @contextlib.asynccontextmanager
    async def hold(self, digest: str, *, tenant: str | None = None) -> AsyncGenerator[float]:
        """The engine has the content for as long as this is entered. Yields the milliseconds that loading took.

        tenant: the request's; None = the server's own work, which counts as no tenant's use. Raises `ServingError`: see
        `ContentLoader.load`.
        """
        with self._reference(digest) as entry:
            load_ms = await self._ensure(digest, entry)
            entry.num_hits += 1
            entry.last_used_at = self._clock()
            if tenant is not None:
                self._uses.count(tenant, digest, entry.last_used_at)
            yield load_ms

    async def load(self, digest: str) -> None:
        """Load it into the engine now, without using it. Raises `ServingError`."""
        with self._reference(digest) as entry:
            await self._ensure(digest, entry)

    def mark_damaged(self, digest: str) -> None:
        """The engine could not read its packed file, of which loading reads only the header. The file is made again
        before the content's next use."""
        if (entry := self._entries.get(digest)) is not None:
            entry.is_damaged = True

    def pin(self, digests: frozenset[str]) -> None:
        """From now on exactly these are never unloaded in favor of others. Does not load them."""
        released, self._pinned = self._pinned - digests, digests
        for digest in digests:
            self._idle.pop(digest, None)
        for digest in released:
            self._note_if_idle(digest)

    def is_wanted(self, digest: str) -> bool:
        """Whether a document that is not deleted refers to it."""
        return digest in self._wanted

    def is_loaded(self, digest: str) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.is_loaded

    def has_forgotten(self, digest: str) -> bool:
        """Whether the engine does not have it and no caller is about to use it."""
        entry = self._entries.get(digest)
        return entry is None or _is_idle(entry)

    def is_on_device(self, digest: str) -> bool:
        stats = self._engine.stats
        if self._on_device_of is None or self._on_device_of[0] is not stats:
            self._on_device_of = (stats, frozenset(stats.resident_adapters))
        return digest in self._on_device_of[1]

    def of(self, digest: str) -> DigestResidency:
        entry = self._entries.get(digest) or _Entry()
        tier = Tier.DISK
        if entry.is_loaded:
            tier = Tier.DEVICE if self.is_on_device(digest) else Tier.HOST
        return DigestResidency(
            digest,
            tier,
            entry.packed_bytes,
            entry.last_used_at,
            entry.num_hits,
            entry.load_ms,
            entry.num_references,
        )

    def seen_by(self, tenant: str, digest: str, *, is_pinned: bool = False) -> DigestResidency:
        """As `of`, but counts only the tenant's own uses: whether others have and use the same content is not revealed.

        Content that the tenant has not used here is shown as on disk, unless a pin that the tenant sees keeps it.
        """
        use = self._uses.of(tenant, digest)
        if use.num_hits == 0 and not is_pinned:
            return DigestResidency(digest, Tier.DISK, None, None, 0, None, 0)
        return replace(self.of(digest), num_hits=use.num_hits, last_used_at=use.last_used_at)

    def not_forgotten(self) -> list[str]:
        """Digests that the engine knows, is unloading, or is about to get."""
        return [digest for digest, entry in self._entries.items() if not _is_idle(entry)]

    async def wait_unloaded(self, digests: set[str], timeout_s: float) -> bool:
        """Whether this engine has, in time, forgotten those of them that no document refers to any more."""
        waiting = [
            asyncio.create_task(entry.unloaded.wait())
            for digest in digests
            if not self.is_wanted(digest) and (entry := self._entries.get(digest)) is not None and not _is_idle(entry)
        ]
        if not waiting:
            return True
        try:
            _, pending = await asyncio.wait(waiting, timeout=timeout_s)
        finally:
            for task in waiting:
                task.cancel()
        return not pending

    async def close(self) -> None:
        """Afterwards nothing runs in the background."""
        self._unloading.cancel()
        await self._unloading.wait()

    @contextlib.contextmanager
    def _reference(self, digest: str) -> Generator[_Entry]:
        entry = self._entries.setdefault(digest, _Entry())
        entry.num_references += 1
        self._idle.pop(digest, None)
        try:
            yield entry
        finally:
            entry.num_references -= 1
            self._note_if_idle(digest)
            self._retire_if_unwanted(digest)
            self._unload_excess()

    async def _ensure(self, digest: str, entry: _Entry) -> float:
        if entry.is_loaded and not entry.is_damaged:
            return 0.0
        async with self._turns.take(digest):
            if entry.is_loaded and not entry.is_damaged:
                return 0.0
            began_s = time.perf_counter()
            entry.packed_bytes = await self._loader.load(digest, repack=entry.is_damaged)
            entry.is_damaged = False
            self._num_loaded += not entry.is_loaded
            entry.is_loaded = True
            entry.unloaded.clear()
            entry.load_ms = (time.perf_counter() - began_s) * 1000
        entry.last_used_at = entry.last_used_at or self._clock()
        self._unload_excess()
        return entry.load_ms

    def _retire_if_unwanted(self, digest: str) -> None:
        entry = self._entries.get(digest)
        if entry is None or entry.num_references > 0 or self.is_wanted(digest):
            return
        self._unloading.start(self._unload(digest, entry, even_if_wanted=False))

    def _unload_excess(self) -> None:
        """Above the limit, unload the least recently used contents that nothing references."""
        for _ in range(min(self._num_loaded - self._max_loaded, len(self._idle))):
            self._unloading.start(self._unload_least_used())

    def _note_if_idle(self, digest: str) -> None:
        """Call when it is no longer referenced or pinned: it becomes the most recently used."""
        entry = self._entries.get(digest)
        if entry is not None and entry.is_loaded and entry.num_references == 0 and digest not in self._pinned:
            self._idle[digest] = None

    async def _unload_least_used(self) -> None:
        """Unless meanwhile nothing is above the limit any more, or everything is used."""
        if self._num_loaded > self._max_loaded and self._idle:
            digest = next(iter(self._idle))
            await self._unload(digest, self._entries[digest], even_if_wanted=True)

    async def _unload(self, digest: str, entry: _Entry, *, even_if_wanted: bool) -> None:
        async with self._turns.take(digest):
            if entry.num_references > 0 or (self.is_wanted(digest) and not even_if_wanted):
                return
            if entry.is_loaded:
                entry.is_loaded = False
                self._num_loaded -= 1
                self._idle.pop(digest, None)
                entry.is_unloading = True
                with contextlib.suppress(EngineDeadError):
                    await self._engine.unload(digest)
                entry.is_unloading = False
            entry.unloaded.set()
            if not self.is_wanted(digest) and _is_idle(entry) and self._entries.get(digest) is entry:
                del self._entries[digest]


def _is_idle(entry: _Entry) -> bool:
    return not entry.is_loaded and not entry.is_unloading and entry.num_references == 0

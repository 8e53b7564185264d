"""What the engines do right now, shown to each principal with the names that it may see."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from loraserve.control.contents.names import ContentNames
from loraserve.control.documents.outage import Outage
from loraserve.control.requests.snapshot_records import EngineSnapshot, ResidentAdapter
from loraserve.control.requests.snapshots import Snapshots
from loraserve.control.tenancy.principal import Principal
from loraserve.engine.request import QueueStats


class RedisState(StrEnum):
    READY = "ready"
    FULL = "full"
    """It accepts no new data: requests go on, nothing can be changed, and other servers' engines are not seen."""
    GRACE = "grace"
    """Gone for a short time only: requests of known keys go on."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class NamedExtent:
    offset_bytes: int
    size_bytes: int
    in_use: bool
    digest: str | None = None
    """None, like the fields below, if it belongs to others. Adjacent ones are merged into one."""
    tenant: str | None = None
    adapter: str | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True)
class NamedQueue:
    tenant: str | None
    """None: all that belongs to others."""
    adapter: str | None
    """None: the base model, or what others use."""
    num_running: int
    num_waiting: int
    num_tokens_waiting: int


@dataclass(frozen=True, slots=True)
class EngineView:
    engine: str
    snapshot: EngineSnapshot
    extents: list[NamedExtent]
    queues: list[NamedQueue]


class LiveViews:
    """Called on the event loop."""

    def __init__(self, snapshots: Snapshots, names: ContentNames, outage: Outage) -> None:
        self._snapshots = snapshots
        self._names = names
        self._outage = outage

    @property
    def redis(self) -> RedisState:
        if self._outage.began_s is None:
            return RedisState.FULL if self._outage.is_full else RedisState.READY
        return RedisState.GRACE if self._outage.allows([]) else RedisState.GONE

    async def engines(self, principal: Principal) -> list[EngineView]:
        """By id. While Redis is gone, only this server's own."""
        snapshots = await self._snapshots.engines()
        return [self._view(principal, engine, snapshots[engine]) for engine in sorted(snapshots)]

    def _view(self, principal: Principal, engine: str, snapshot: EngineSnapshot) -> EngineView:
        own = {queue.adapter_digest for queue in snapshot.queues if queue.tenant == principal.acting_tenant}
        extents = (self._extent(principal, resident, own) for resident in snapshot.arena)
        return EngineView(
            engine,
            snapshot,
            extents=list(_joined(extents)),
            queues=self._queues(principal, snapshot.queues),
        )

    def _extent(self, principal: Principal, resident: ResidentAdapter, own: set[str | None]) -> NamedExtent:
        """own: digests for which the acting tenant has work."""
        where, in_use = (resident.offset_bytes, resident.size_bytes), resident.in_use
        name = self._names.name(principal, resident.digest)
        if name is None:
            # A principal that may see every tenant gets the digest: the content's adapter was deleted a while ago.
            return NamedExtent(*where, in_use, digest=resident.digest if principal.is_any_tenant else None)
        # Whether other tenants use a shared adapter is not shown.
        in_use = in_use and (principal.is_any_tenant or resident.digest in own)
        return NamedExtent(*where, in_use, resident.digest, name.tenant, name.adapter, name.version)

    def _queues(self, principal: Principal, queues: list[QueueStats]) -> list[NamedQueue]:
        """By name; what belongs to others comes last."""
        sums: dict[tuple[str | None, str | None], list[int]] = {}
        for queue in queues:
            row = sums.setdefault(self._row(principal, queue), [0, 0, 0])
            row[0] += queue.num_running
            row[1] += queue.num_waiting
            row[2] += queue.num_tokens_waiting
        rows = sorted(sums, key=lambda names: (names[0] is None, names[0] or "", names[1] or ""))
        return [NamedQueue(*names, *sums[names]) for names in rows]

    def _row(self, principal: Principal, queue: QueueStats) -> tuple[str | None, str | None]:
        if not principal.is_any_tenant and queue.tenant != principal.acting_tenant:
            return None, None
        if queue.adapter_digest is None:
            return queue.tenant, None
        name = self._names.name(principal, queue.adapter_digest, queue.tenant)
        # A key restricted to some adapters sees the work of all others as one sum.
        return (None, None) if name is None else (queue.tenant, name.adapter)


def _joined(extents: Iterator[NamedExtent]) -> Iterator[NamedExtent]:
    """Merges adjacent extents of others, so that their number and sizes reveal nothing."""
    last: NamedExtent | None = None
    for extent in extents:
        if last is not None and last.digest is None and extent.digest is None and _touch(last, extent):
            size_bytes = last.size_bytes + extent.size_bytes
            last = NamedExtent(last.offset_bytes, size_bytes, last.in_use or extent.in_use)
            continue
        if last is not None:
            yield last
        last = extent
    if last is not None:
        yield last


def _touch(left: NamedExtent, right: NamedExtent) -> bool:
    return left.offset_bytes + left.size_bytes == right.offset_bytes

"""What the other servers on the same Redis run and have, as they report every second."""

from collections.abc import Callable, Mapping

import msgspec

from loraserve.control.requests.snapshot_records import ProcessSnapshot, short_digest
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.live_store import LiveStore
from loraserve.live.snapshots import SnapshotKind


class OtherServers:
    """Based on their newest snapshots. Servers that are gone run and have nothing. While Redis is gone, nothing is
    known, so they may run and have everything."""

    def __init__(self, live: LiveStore, process: str) -> None:
        """process: id of this one."""
        self._live = live
        self._process = process
        self._decoder = msgspec.json.Decoder(ProcessSnapshot)

    async def last_report_times(self) -> Mapping[str, float]:
        """When each server last reported, by its own clock."""
        try:
            snapshots = await self._live.snapshots.all(SnapshotKind.PROCESS)
        except LiveUnavailableError:
            return {}
        return {snapshot.owner: snapshot.at for snapshot in snapshots}

    async def any_runs(self, adapter: str, since: Mapping[str, float]) -> bool:
        """Whether another server may have a request for an adapter: it reports one, or has not reported again.

        adapter: its document's id. since: from `last_report_times`.
        """
        return await self._any(lambda process: adapter in process.adapters, since)

    async def any_serves(self, tenant: str, since: Mapping[str, float]) -> bool:
        """Likewise, whether another server may have a request of a tenant."""
        return await self._any(lambda process: tenant in process.tenants, since)

    async def any_has(self, digests: set[str], since: Mapping[str, float]) -> bool:
        """Likewise, whether another server's engine may know one of these contents."""
        wanted = {short_digest(digest) for digest in digests}
        return bool(wanted) and await self._any(lambda process: not wanted.isdisjoint(process.digests), since)

    async def _any(self, reports: Callable[[ProcessSnapshot], bool], since: Mapping[str, float]) -> bool:
        try:
            snapshots = await self._live.snapshots.all(SnapshotKind.PROCESS)
        except LiveUnavailableError:
            return True
        return any(
            snapshot.at == since.get(snapshot.owner) or reports(self._decoder.decode(snapshot.body))
            for snapshot in snapshots
            if snapshot.owner != self._process
        )

"""Gives every request that a killed process left behind its one ending: lost and not billed, unless it had ended."""

import time

from loraserve.control.requests.records import left_behind
from loraserve.control.requests.snapshot_records import RequestRecord
from loraserve.control.requests.snapshots import Snapshots
from loraserve.live.admission_records import FinishCall
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.live_store import LiveStore

AT_ONCE = 100


class LostRequests:
    """Called on the event loop. Any server does it for all; several do not conflict."""

    def __init__(self, live: LiveStore, snapshots: Snapshots) -> None:
        self._live = live
        self._snapshots = snapshots

    async def sweep(self) -> int:
        """Returns how many got their ending, 15 s after their process was last heard from; 0 while Redis is gone."""
        num_ended = 0
        try:
            while leases := await self._live.leases.lapsed(AT_ONCE):
                last: dict[str, dict[str, RequestRecord]] = {}
                for lease in leases:
                    if lease.process not in last:
                        records = await self._snapshots.last_requests(lease.process)
                        last[lease.process] = {record.id: record for record in records}
                    ended = left_behind(lease, last[lease.process].get(lease.request_id), time.time())
                    reply = await self._live.admission.finish(FinishCall(lease=lease, request=ended))
                    num_ended += reply.was_first
                if len(leases) < AT_ONCE:
                    break
        except LiveUnavailableError:
            return num_ended
        return num_ended

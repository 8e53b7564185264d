"""Everything kept in Redis, by topic."""

from loraserve.live.aborts import LiveAborts
from loraserve.live.admission import LiveAdmission
from loraserve.live.audit import LiveAudit
from loraserve.live.changes import ChangeFeed
from loraserve.live.connection import CALL_S, LiveConnection
from loraserve.live.documents import LiveDocuments
from loraserve.live.key_names import DEFAULT_PREFIX, KeyNames
from loraserve.live.leases import LiveLeases
from loraserve.live.publish_leases import LivePublishLeases
from loraserve.live.requests import LiveRequests
from loraserve.live.series import LiveSeries
from loraserve.live.sessions import LiveSessions
from loraserve.live.snapshots import LiveSnapshots
from loraserve.live.usage import LiveUsage
from loraserve.live.view import LiveView


class LiveStore:
    """Connects on first use. `url` is redis://, rediss:// or unix://."""

    def __init__(self, url: str, prefix: str = DEFAULT_PREFIX, *, timeout_s: float = CALL_S) -> None:
        self.connection = LiveConnection(url, timeout_s=timeout_s)
        names = KeyNames(prefix)
        self.view = LiveView(self.connection, names)
        self.documents = LiveDocuments(self.connection, names)
        self.changes = ChangeFeed(self.connection, names)
        self.leases = LiveLeases(self.connection, names)
        self.admission = LiveAdmission(self.connection, names, self.view, self.leases)
        self.publish_leases = LivePublishLeases(self.connection, names)
        self.aborts = LiveAborts(self.connection, names)
        self.requests = LiveRequests(self.connection, names)
        self.snapshots = LiveSnapshots(self.connection, names)
        self.series = LiveSeries(self.connection, names)
        self.sessions = LiveSessions(self.connection, names)
        self.usage = LiveUsage(self.connection, names)
        self.audit = LiveAudit(self.connection, names)

    async def close(self) -> None:
        await self.changes.close()
        await self.connection.close()

"""What each engine and process is doing: replaced as a whole every second, gone soon after its owner."""

import time
from enum import StrEnum

import msgspec

from loraserve.live.connection import LiveConnection
from loraserve.live.key_names import KeyNames

SNAPSHOT_MS = 5000


class SnapshotKind(StrEnum):
    ENGINE = "e"
    PROCESS = "p"
    REQUESTS = "q"
    """Requests that a process runs, or whose end it is reporting."""


KEPT_MS = {
    SnapshotKind.ENGINE: SNAPSHOT_MS,
    SnapshotKind.PROCESS: SNAPSHOT_MS,
    # So that a lost request can still be described once it counts as lost, 15 s after its process was last heard.
    SnapshotKind.REQUESTS: 60_000,
}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    owner: str
    """Engine or process id."""
    at: float
    """Unix time."""
    body: msgspec.Raw
    """JSON from the caller."""


class LiveSnapshots:
    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names
        self._decoder = msgspec.json.Decoder(Snapshot)

    async def put(self, kind: SnapshotKind, snapshot: Snapshot) -> None:
        """Raises LiveUnavailableError."""
        owners = self._names.snapshot_owners(kind)
        now_ms = int(time.time() * 1000)
        name = self._names.snapshot(kind, snapshot.owner)
        await self._connection.call_many(
            [
                ["SET", name, msgspec.json.encode(snapshot), "PX", KEPT_MS[kind]],
                ["ZADD", owners, now_ms, snapshot.owner],
            ]
        )

    async def get(self, kind: SnapshotKind, owner: str) -> Snapshot | None:
        """Raises LiveUnavailableError."""
        body = await self._connection.call("GET", self._names.snapshot(kind, owner))
        return None if body is None else self._decoder.decode(body)

    async def all(self, kind: SnapshotKind) -> list[Snapshot]:
        """All existing snapshots, sorted by owner. Raises LiveUnavailableError."""
        owners = await self._connection.call("ZRANGE", self._names.snapshot_owners(kind), 0, -1)
        if not owners:
            return []
        names = [self._names.snapshot(kind, owner.decode()) for owner in owners]
        bodies = await self._connection.call("MGET", *names)
        # Judged by the missing snapshot, not by the time last seen, which comes from the owner's clock. An owner that
        # was only late is back with its next snapshot.
        gone = [owner for owner, body in zip(owners, bodies, strict=True) if body is None]
        if gone:
            await self._connection.call("ZREM", self._names.snapshot_owners(kind), *gone)
        return sorted((self._decoder.decode(body) for body in bodies if body is not None), key=lambda s: s.owner)

    async def remove(self, kind: SnapshotKind, owner: str) -> None:
        """For an owner that is ending. Raises LiveUnavailableError."""
        await self._connection.call_many(
            [
                ["DEL", self._names.snapshot(kind, owner)],
                ["ZREM", self._names.snapshot_owners(kind), owner],
            ]
        )

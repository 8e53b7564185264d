"""Requests in flight, each a 10 s lease that its process renews. No counter goes up and down, so nothing can drift."""

import asyncio
import contextlib
import time

import msgspec

from loraserve.live.connection import LiveConnection
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.key_names import KeyNames
from loraserve.live.snapshots import SnapshotKind

LEASE_MS = 10_000
RENEW_EVERY_S = 2.0
LAPSED_AFTER_MS = 5_000
"""From the end of a lease until its request counts as lost: 15 s after its process was last heard."""
NO_KEY = "-"


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    process: str
    tenant: str
    key_id: str | None = None
    """None: the request has no key document."""

    def member(self) -> str:
        """The entry in the sorted set of all leases; names the owner, for whichever process finds it lapsed."""
        return ",".join((self.request_id, self.process, self.tenant, self.key_id or NO_KEY))


def parse_member(member: bytes) -> Lease:
    request_id, process, tenant, key_id = member.decode().split(",")
    return Lease(request_id=request_id, process=process, tenant=tenant, key_id=None if key_id == NO_KEY else key_id)


class LiveLeases:
    """This process's leases. `renew_forever` renews those it holds, even into an emptied Redis."""

    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names
        self._held: dict[str, Lease] = {}
        self._unconfirmed: set[str] = set()
        """Subset of `_held`: admission got no answer, and not renewed since."""
        self._put_by_renewal: set[str] = set()
        """Subset of `_held`: may have been put into Redis by a renewal instead of by admission."""
        self._renewing = asyncio.Lock()

    def hold(self, lease: Lease, *, is_confirmed: bool = True) -> None:
        """is_confirmed: whether its admission was answered."""
        self._held[lease.request_id] = lease
        if not is_confirmed:
            self._unconfirmed.add(lease.request_id)

    async def drop(self, request_id: str) -> bool:
        """After this returns, no running renewal can bring the lease back.

        Returns whether the lease, if it is in Redis, was put there by its admission; if that was not answered, as far
        as is known.
        """
        self._held.pop(request_id, None)
        if self._renewing.locked():
            async with self._renewing:
                pass
        was_put_by_renewal = request_id in self._put_by_renewal
        self._unconfirmed.discard(request_id)
        self._put_by_renewal.discard(request_id)
        return not was_put_by_renewal

    async def renew_forever(self) -> None:
        while True:
            with contextlib.suppress(LiveUnavailableError):
                await self.renew()
            await asyncio.sleep(RENEW_EVERY_S)

    async def renew(self) -> None:
        """Raises LiveUnavailableError."""
        async with self._renewing:
            if not self._held:
                return
            end_ms = await self._connection.server_time_ms() + LEASE_MS
            members: dict[str, list[str]] = {}
            for lease in self._held.values():
                members.setdefault(self._names.all_leases(), []).append(lease.member())
                members.setdefault(self._names.tenant_leases(lease.tenant), []).append(lease.request_id)
                if lease.key_id is not None:
                    members.setdefault(self._names.key_leases(lease.key_id), []).append(lease.request_id)
            unconfirmed = [self._held[request_id] for request_id in self._unconfirmed if request_id in self._held]
            commands: list[list[str | int]] = [
                ["ZADD", self._names.all_leases(), end_ms, lease.member()] for lease in unconfirmed
            ]
            for name, entries in members.items():
                scored = [part for entry in entries for part in (end_ms, entry)]
                commands.append(["ZADD", name, *scored])
                if name != self._names.all_leases():
                    commands.append(["PEXPIRE", name, 2 * LEASE_MS])
            unconfirmed_ids = {lease.request_id for lease in unconfirmed}
            self._unconfirmed -= unconfirmed_ids
            self._put_by_renewal |= unconfirmed_ids
            replies = await self._connection.call_many(commands)
            for lease, num_added in zip(unconfirmed, replies, strict=False):
                if num_added == 0:
                    self._put_by_renewal.discard(lease.request_id)

    async def is_in_flight(self, tenant: str, request_id: str) -> bool:
        """Whether a server runs it, or did until a few seconds ago. Raises LiveUnavailableError."""
        return await self._connection.call("ZSCORE", self._names.tenant_leases(tenant), request_id) is not None

    async def lapsed(self, limit: int = 100) -> list[Lease]:
        """Requests whose process is gone; finish them as lost. Empty in the first 15 s after Redis became reachable.

        At most `limit`, oldest first; skips requests that a live process has not settled yet. Raises
        LiveUnavailableError.
        """
        settled_s = (LEASE_MS + LAPSED_AFTER_MS) / 1000
        if self._connection.up_since is None or time.monotonic() - self._connection.up_since < settled_s:
            return []
        before_ms = await self._connection.server_time_ms() - LAPSED_AFTER_MS
        alive: dict[str, bool] = {}
        lapsed: list[Lease] = []
        num_seen = 0
        while len(lapsed) < limit:
            members = await self._connection.call(
                "ZRANGEBYSCORE", self._names.all_leases(), "-inf", before_ms, "LIMIT", num_seen, limit
            )
            num_seen += len(members)
            for lease in map(parse_member, members):
                if lease.process not in alive:
                    snapshot = self._names.snapshot(SnapshotKind.PROCESS, lease.process)
                    alive[lease.process] = bool(await self._connection.call("EXISTS", snapshot))
                if not alive[lease.process]:
                    lapsed.append(lease)
            if len(members) < limit:
                break
        return lapsed[:limit]

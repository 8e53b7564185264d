"""One publisher at a time per tenant, across all processes."""

from loraserve.live.connection import LiveConnection
from loraserve.live.key_names import KeyNames
from loraserve.live.script_loader import load_script

PUBLISH_LEASE_MS = 15_000
"""Never renewed: checking a quota and committing a document takes milliseconds."""


class LivePublishLeases:
    """A lease expires by itself, so a killed or stalled holder blocks others no longer than `PUBLISH_LEASE_MS`.

    Every method raises LiveUnavailableError.
    """

    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names
        self._release = load_script("lease_release")

    async def try_take(self, tenant: str, token: str) -> bool:
        """token: unique to the caller. False: another caller holds the lease."""
        name = self._names.publish_lease(tenant)
        return await self._connection.call("SET", name, token, "NX", "PX", PUBLISH_LEASE_MS) is not None

    async def drop_all(self) -> None:
        """For the server that just started its private Redis, which interrupted whoever held one."""
        found = await self._connection.call("KEYS", self._names.publish_lease("*"))
        if found:
            await self._connection.call("DEL", *found)

    async def release(self, tenant: str, token: str) -> bool:
        """False: the lease had lapsed. Another holder's lease is left alone."""
        reply = await self._connection.run_script(self._release, [self._names.publish_lease(tenant)], [token])
        return reply == 1

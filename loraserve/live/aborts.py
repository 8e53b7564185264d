"""Requests that somebody else wants ended: told to the process that runs them."""

from loraserve.live.connection import LiveConnection
from loraserve.live.key_names import KeyNames

ABORT_S = 30
"""A process looks each second; one that does not look for so long is gone."""
AT_ONCE = 1000


class LiveAborts:
    """Every method raises LiveUnavailableError."""

    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names

    async def ask(self, process: str, request_id: str) -> None:
        name = self._names.aborts(process)
        await self._connection.call_many([["SADD", name, request_id], ["EXPIRE", name, ABORT_S]])

    async def take(self, process: str) -> list[str]:
        """What was asked of this process since the last call."""
        found = await self._connection.call("SPOP", self._names.aborts(process), AT_ONCE)
        return [request_id.decode() for request_id in found or []]

"""Requests to abort, passed on to the process that runs them."""

from loraserve.live.connection import LiveConnection
from loraserve.live.key_names import KeyNames

ABORT_S = 30
"""A process checks every second; one that has not checked for this long is gone."""
AT_ONCE = 1000


class LiveAborts:
    """Every method raises LiveUnavailableError."""

    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names

    async def request(self, process: str, request_id: str) -> None:
        name = self._names.aborts(process)
        await self._connection.call_many([["SADD", name, request_id], ["EXPIRE", name, ABORT_S]])

    async def take(self, process: str) -> list[str]:
        """Requests that this process was asked to abort since the last call."""
        found = await self._connection.call("SPOP", self._names.aborts(process), AT_ONCE)
        return [request_id.decode() for request_id in found or []]

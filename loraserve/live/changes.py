"""The feed of document changes, on its own socket because reads block."""

import asyncio

import msgspec
from redis.exceptions import RedisError

from loraserve.live.connection import CALL_S, LiveConnection
from loraserve.live.errors import LiveRestartedError, LiveUnavailableError
from loraserve.live.key_names import KeyNames
from loraserve.live.server_link import NotPrimaryError, ServerLink
from loraserve.store.records import DocumentKind

NUM_CHANGES = 10_000
"""Approximate number kept; a reader further behind compares all documents."""
CHANGES_AT_ONCE = 500


class Change(msgspec.Struct, frozen=True, kw_only=True):
    position: str
    kind: DocumentKind
    id: str
    rev: int


class ChangeFeed:
    """For use by one task."""

    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names
        self._link: ServerLink | None = None
        self._run_id: str | None = None

    async def latest(self) -> str:
        """Position of the newest change. Call it before reading documents, so that no change is missed.

        Raises LiveUnavailableError.
        """
        entries = await self._connection.call("XREVRANGE", self._names.changes(), "+", "-", "COUNT", 1)
        return entries[0][0].decode() if entries else "0-0"

    async def read(self, after: str, wait_s: float = 1.0) -> list[Change]:
        """Waits up to `wait_s` for the first change; empty if there is none.

        Raises LiveUnavailableError, and LiveRestartedError once per change of the server process.
        """
        if self._link is None:
            self._link = self._connection.new_link()
        command = [
            *("XREAD", "COUNT", CHANGES_AT_ONCE, "BLOCK", max(1, int(wait_s * 1000))),
            *("STREAMS", self._names.changes(), after),
        ]
        try:
            async with asyncio.timeout(wait_s + CALL_S):
                await self._link.ready(self._connection.generation)
                self._check_run_id(self._link.run_id)
                (streams,) = await self._link.exchange([command])
        except (RedisError, OSError) as error:
            if isinstance(error, NotPrimaryError):
                self._connection.renew_links(error.moved_to)
            raise LiveUnavailableError(
                f"cannot read changes from Redis: {str(error) or 'no answer in time'}"
            ) from error
        return [_change(position, fields) for _, entries in streams or [] for position, fields in entries]

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()
        self._link = None

    def _check_run_id(self, run_id: str) -> None:
        known, self._run_id = self._run_id, run_id
        if known is not None and known != run_id:
            raise LiveRestartedError("Redis was restarted or replaced while changes were being read")


def _change(position: bytes, fields: list[bytes]) -> Change:
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    return Change(
        position=position.decode(),
        kind=DocumentKind(values[b"kind"].decode()),
        id=values[b"id"].decode(),
        rev=int(values[b"rev"]),
    )

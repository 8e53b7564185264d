"""One socket to Redis on which a reply always belongs to the command before it."""

import math
from collections.abc import Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

Arg = str | bytes | int | float
Command = Sequence[Arg]


class ServerLink:
    """For one task at a time.

    An exchange that does not run to its end, by an error or by being cancelled, closes the socket: otherwise the next
    command would be answered with the reply that came too late (CVE-2023-28858).
    """

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self.run_id = ""
        """Of the server process, since `ready`."""

    async def ready(self) -> None:
        """Connects if need be; then nothing is there to read. Raises RedisError or OSError."""
        if self._connection.is_connected and not await self._connection.can_read():
            return
        await self.close()
        try:
            await self._connection.connect()
            (info,) = await self.exchange([["INFO", "server"]])
        except BaseException:
            # Connecting greets and authenticates in several exchanges, of which any may have been cancelled.
            await self.close()
            raise
        self.run_id = parse_run_id(info)

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """A reply for each; the caller watches the time.

        Raises the first ResponseError after all were read, other RedisErrors and OSError at once.
        """
        connection = self._connection
        replies: list[Any] = []
        is_complete = False
        failure: ResponseError | None = None
        try:
            await connection.send_packed_command(connection.pack_commands(commands))
            for _ in commands:
                try:
                    replies.append(await connection.read_response(timeout=math.inf))
                except ResponseError as error:
                    failure = failure or error
                    replies.append(None)
            is_complete = True
        finally:
            if not is_complete:
                await self.close()
        if failure is not None:
            raise failure
        return replies

    async def close(self) -> None:
        """Does not wait, so that it cannot be cancelled."""
        await self._connection.disconnect(nowait=True)


def parse_run_id(info: bytes) -> str:
    """From the answer to INFO."""
    for line in info.decode().splitlines():
        name, _, value = line.partition(":")
        if name == "run_id":
            return value
    raise ResponseError("INFO server names no run_id; is this Redis 6.2 or newer, or a Valkey?")

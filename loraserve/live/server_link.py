"""One socket to Redis on which a reply always belongs to the command before it."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import MovedError, RedisError, ResponseError

Arg = str | bytes | int | float
Command = Sequence[Arg]
Address = tuple[str, int]
"""Host and port; no host = that of whoever named the port."""

NOT_PRIMARY = frozenset({"READONLY", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED", "CLUSTERDOWN"})
"""Codes of errors by which a server says that another one decides by now, or may."""
_OF_A_SCRIPT = re.compile(r": -([A-Z]+) ")
"""Redis 6.2 wraps what a script's command was answered: "Error running script (…): @user_script:12: -READONLY …"."""


class NotPrimaryError(RedisError):
    """The server is a replica, or was cut off from the others. Its address may lead to the one that decides by now."""

    def __init__(self, message: str, moved_to: Address | None = None) -> None:
        """moved_to: the node of the cluster that has our keys; then this one has done nothing."""
        super().__init__(message)
        self.moved_to = moved_to


class ServerLink:
    """For one task at a time.

    An exchange that does not run to its end, by an error or by being cancelled, closes the socket: otherwise the next
    command would be answered with the reply that came too late (CVE-2023-28858).
    """

    def __init__(self, make_connection: Callable[[], AbstractConnection]) -> None:
        """make_connection: to the address of now."""
        self._make_connection = make_connection
        self._connection = make_connection()
        self.run_id = ""
        """Of the server process, since `ready`."""
        self._generation = 0

    async def ready(self, generation: int) -> None:
        """Connects to a primary if need be, or if it did so for an earlier generation; then nothing is there to read.

        Raises RedisError or OSError.
        """
        is_of_now = self._connection.is_connected and self._generation == generation
        if is_of_now and not await self._connection.can_read():
            return
        await self.close()
        if self._generation != generation:
            self._connection = self._make_connection()
            self._generation = generation
        try:
            await self._connection.connect()
            sections = ("server", "replication", "cluster")
            info, replication, cluster = await self.exchange([["INFO", section] for section in sections])
            # A cluster's replica does nothing with keys either, and says who does.
            is_alone = _try_field(cluster, "cluster_enabled") != "1"
            if is_alone and _try_field(replication, "role") == "slave":
                raise NotPrimaryError("the server does not decide: it is a replica")
        except BaseException:
            # Connecting greets and authenticates in several exchanges, of which any may have been cancelled.
            await self.close()
            raise
        self.run_id = parse_run_id(info)

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """A reply for each; the caller watches the time.

        Raises the first ResponseError after all were read; NotPrimaryError, other RedisErrors and OSError at once.
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
                except MovedError as error:
                    message = f"another node of the cluster has the keys: {error}"
                    raise NotPrimaryError(message, error.node_addr) from error
                except ResponseError as error:
                    if _is_of_no_primary(error):
                        raise NotPrimaryError(f"the server does not decide: {error}") from error
                    failure = failure or error
                    replies.append(None)
                except ValueError as error:  # redis-py takes errors apart, such as MOVED without an address
                    raise RedisError(f"its answer cannot be read: {error}") from error
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
    run_id = _try_field(info, "run_id")
    if run_id is None:
        raise ResponseError("INFO server names no run_id; is this Redis 6.2 or newer, or a Valkey?")
    return run_id


def _try_field(info: bytes, wanted: str) -> str | None:
    for line in info.decode().splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            return value
    return None


def _is_of_no_primary(error: ResponseError) -> bool:
    text = str(error)
    # A code that redis-py has no class for stays in the text.
    codes = {error.status_code, text.partition(" ")[0], *_OF_A_SCRIPT.findall(text)}
    return not NOT_PRIMARY.isdisjoint(codes)

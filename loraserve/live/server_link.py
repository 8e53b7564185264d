"""One socket to Redis, on which a reply always belongs to the preceding command."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import MovedError, RedisError, ResponseError

Arg = str | bytes | int | float
Command = Sequence[Arg]
Address = tuple[str, int]
"""Host and port; an empty host = the host of the URL."""

NOT_PRIMARY = frozenset({"READONLY", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED", "CLUSTERDOWN"})
"""Error codes with which a server reports that another one is, or may be, the primary now."""
_SCRIPT_ERROR = re.compile(r": -([A-Z]+) ")
"""Redis 6.2 wraps the error of a script's command: "Error running script (…): @user_script:12: -READONLY …"."""


class NotPrimaryError(RedisError):
    """The server is a replica, or was cut off from the others. Its address may now lead to the primary."""

    def __init__(self, message: str, moved_to: Address | None = None) -> None:
        """moved_to: the cluster node that has our keys; in that case this server has executed nothing."""
        super().__init__(message)
        self.moved_to = moved_to


class ServerLink:
    """For one task at a time.

    An exchange that fails or is cancelled closes the socket: otherwise the next command would get the late reply
    (CVE-2023-28858).
    """

    def __init__(self, make_connection: Callable[[], AbstractConnection]) -> None:
        """make_connection: returns a connection to the current address."""
        self._make_connection = make_connection
        self._connection = make_connection()
        self.run_id = ""
        """Run id of the server process, set by `ready`."""
        self._generation = 0

    async def ready(self, generation: int) -> None:
        """Connects to a primary unless already connected for this generation; afterwards no unread data is left.

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
            # In a cluster, a replica executes no commands on keys either, but redirects to the node that does.
            is_alone = _try_field(cluster, "cluster_enabled") != "1"
            if is_alone and _try_field(replication, "role") == "slave":
                raise NotPrimaryError("the server cannot act as the primary: it is a replica")
        except BaseException:
            # Connecting performs handshake and authentication in several exchanges; any of them may be cancelled.
            await self.close()
            raise
        self.run_id = parse_run_id(info)

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """One reply per command; the caller enforces the timeout.

        Raises the first ResponseError after all replies were read; NotPrimaryError, other RedisErrors and OSError at
        once.
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
                    message = f"another cluster node has the keys: {error}"
                    raise NotPrimaryError(message, error.node_addr) from error
                except ResponseError as error:
                    if _is_of_no_primary(error):
                        raise NotPrimaryError(f"the server cannot act as the primary: {error}") from error
                    failure = failure or error
                    replies.append(None)
                except ValueError as error:  # redis-py fails to parse some errors, such as MOVED without an address
                    raise RedisError(f"its answer cannot be parsed: {error}") from error
            is_complete = True
        finally:
            if not is_complete:
                await self.close()
        if failure is not None:
            raise failure
        return replies

    async def close(self) -> None:
        """Does not wait, so it cannot be cancelled."""
        await self._connection.disconnect(nowait=True)


def parse_run_id(info: bytes) -> str:
    """Parses the answer to INFO."""
    run_id = _try_field(info, "run_id")
    if run_id is None:
        raise ResponseError("INFO server returned no run_id; is this Redis 6.2 or newer, or a Valkey?")
    return run_id


def _try_field(info: bytes, wanted: str) -> str | None:
    for line in info.decode().splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            return value
    return None


def _is_of_no_primary(error: ResponseError) -> bool:
    text = str(error)
    # If redis-py has no class for a code, it stays in the text.
    codes = {error.status_code, text.partition(" ")[0], *_SCRIPT_ERROR.findall(text)}
    return not NOT_PRIMARY.isdisjoint(codes)

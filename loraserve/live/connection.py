"""Calls to Redis: up to 16 sockets, one second per call, and a breaker."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.maint_notifications import MaintNotificationsConfig

from loraserve.live.breaker import Breaker
from loraserve.live.errors import LiveRefusedError, LiveRestartedError, LiveUnavailableError, LiveUrlError
from loraserve.live.script_loader import Script
from loraserve.live.server_link import Address, Arg, Command, NotPrimaryError, ServerLink

CALL_S = 1.0
WAIT_S = 2.0
"""For one of the links, while Redis answers all calls in time, but not as fast as they come. Renewals of leases and
snapshots wait, too, several times in a row, and must come before those expire."""
NUM_LINKS = 16
MOVES_FOLLOWED = 2
"""Redirections between nodes of a cluster that one call follows."""
REFUSAL_LOG_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class LiveConnection:
    """Replies are bytes, ints, lists and None, as in RESP2.

    Raises LiveUrlError. Calls raise LiveUnavailableError if Redis does not answer in time, counted from when a link is
    free. A call that is cancelled or times out never leaves its reply to another call.
    """

    def __init__(self, url: str, *, timeout_s: float = CALL_S, max_links: int = NUM_LINKS) -> None:
        self._timeout_s = timeout_s
        # Only parses the URL. Its pool is not used: `release` can be cancelled, which loses the socket's place in the
        # pool for good.
        self._factory = _factory(url, timeout_s)
        self._moved_to: Address | None = None
        """The cluster node with the single slot of all our keys; None = the server at the URL's address."""
        self._places = asyncio.Semaphore(max_links)
        self._wait_s = WAIT_S
        self._idle: list[ServerLink] = []
        self._breaker = Breaker()
        self.run_id = ""
        """Run id of the server process that answered last."""
        self.up_since: float | None = None
        """When that server became reachable, by time.monotonic(); None while it is unreachable."""
        self.generation = 0
        """Goes up when a server turns out not to be the primary: older links then reconnect."""
        self._refusal_logged_s = float("-inf")

    async def call(self, *command: Arg) -> Any:
        return (await self.call_many([command]))[0]

    async def call_many(self, commands: Sequence[Command]) -> list[Any]:
        """In one round trip; not atomic. Not for scripts: a cluster client could not run them this way."""
        try:
            return await self._exchange(commands, None)
        except ResponseError as error:
            raise self._refused(error) from error

    async def run_script(
        self, script: Script, keys: Sequence[str], args: Sequence[Arg], run_id: str | None = None
    ) -> Any:
        """run_id: if given, raises LiveRestartedError instead of sending the script to another server process."""
        try:
            try:
                replies = await self._exchange([["EVALSHA", script.sha1, len(keys), *keys, *args]], run_id)
            except NoScriptError:
                replies = await self._exchange([["EVAL", script.source, len(keys), *keys, *args]], run_id)
        except ResponseError as error:
            raise self._refused(error) from error
        return replies[0]

    async def server_time_ms(self) -> int:
        seconds, microseconds = await self.call("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    def renew_links(self, moved_to: Address | None = None) -> None:
        """Call if a server is not, or no longer, the primary: addresses are resolved and documents compared again.

        moved_to: the cluster node to which links connect from now on.
        """
        if moved_to is None or moved_to != self._moved_to:
            self._moved_to = moved_to
            self.generation += 1

    def new_link(self) -> ServerLink:
        """For a caller that waits on Redis for longer than one call may take."""
        return ServerLink(self._make_connection)

    async def close(self) -> None:
        for link in self._idle:
            await link.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the loop's next iteration

    async def _exchange(self, commands: Sequence[Command], run_id: str | None) -> list[Any]:
        generation = self.generation
        # Waiting for a link is not part of the timeout: a busy server would report a healthy Redis as gone. If one of
        # the calls ahead reaches its timeout, the breaker opens, and the others fail.
        try:
            async with asyncio.timeout(self._wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise LiveUnavailableError(f"{self._wait_s:g} s of calls to Redis are waiting for an answer") from None
        try:
            return await self._exchange_in_time(commands, run_id, generation)
        finally:
            self._places.release()

    async def _exchange_in_time(self, commands: Sequence[Command], run_id: str | None, generation: int) -> list[Any]:
        wait_s = self._breaker.seconds_to_wait()
        if wait_s > 0:
            raise LiveUnavailableError(self._breaker.reason, wait_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                replies = await self._exchange_wherever_it_is(commands, run_id, generation)
        except (ResponseError, LiveRestartedError):
            self._breaker.succeeded()
            raise
        except (RedisError, OSError) as error:
            is_late = isinstance(error, TimeoutError) and not str(error)
            reason = f"no answer from Redis within {self._timeout_s * 1000:g} ms" if is_late else f"Redis: {error}"
            self._breaker.failed(reason)
            self.up_since = None
            if isinstance(error, NotPrimaryError) or self._moved_to is not None:
                self.renew_links()
            raise LiveUnavailableError(reason) from error
        self._breaker.succeeded()
        return replies

    async def _exchange_wherever_it_is(
        self, commands: Sequence[Command], run_id: str | None, generation: int
    ) -> list[Any]:
        for _ in range(MOVES_FOLLOWED):
            try:
                return await self._exchange_on_a_link(commands, run_id, generation)
            except NotPrimaryError as error:
                # With a Unix socket there is no way to reach another node.
                if error.moved_to is None or "host" not in self._factory.connection_kwargs:
                    raise
                self.renew_links(error.moved_to)
        return await self._exchange_on_a_link(commands, run_id, generation)

    async def _exchange_on_a_link(self, commands: Sequence[Command], run_id: str | None, generation: int) -> list[Any]:
        link = self._idle.pop() if self._idle else self.new_link()
        try:
            await link.ready(self.generation)
            self._answered(link)
            if run_id is not None and (link.run_id, self.generation) != (run_id, generation):
                raise LiveRestartedError("Redis is not the process that this server compared its documents with")
            return await link.exchange(commands)
        finally:
            self._idle.append(link)

    def _refused(self, error: ResponseError) -> LiveRefusedError:
        """Also logs it: a server that answers, but is full or cannot write to its disk, is not detected as down."""
        now_s = time.monotonic()
        if now_s - self._refusal_logged_s >= REFUSAL_LOG_INTERVAL_S:
            self._refusal_logged_s = now_s
            logger.error("Redis answers, but refuses commands: %s", error)
        return LiveRefusedError(f"Redis refused: {error}")

    def _make_connection(self) -> AbstractConnection:
        arguments = dict(self._factory.connection_kwargs)
        if self._moved_to is not None:
            host, port = self._moved_to
            arguments |= {"host": host or arguments["host"], "port": port}
        return self._factory.connection_class(**arguments)

    def _answered(self, link: ServerLink) -> None:
        if self.up_since is None or link.run_id != self.run_id:
            self.up_since = time.monotonic()
        self.run_id = link.run_id


def _factory(url: str, timeout_s: float) -> ConnectionPool:
    try:
        factory = ConnectionPool.from_url(
            url,
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            # Otherwise redis-py requests them on TCP connections, where they need RESP3.
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
        )
        factory.connection_kwargs["protocol"] = 2
        factory.make_connection()
    except (ValueError, TypeError):
        # Their messages may quote a password.
        raise LiveUrlError(
            "the URL of Redis must begin with redis://, rediss:// or unix:// and have no unknown options"
        ) from None
    return factory

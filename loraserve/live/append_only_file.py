"""The private server's file on a full disk, without which the server goes on: all that it holds can be built again."""

import asyncio
import logging
import time
from pathlib import Path

WATCH_EVERY_S = 1.0
AGAIN_AFTER_S = 60.0
"""How long it does without its file before it tries again."""
ASK_S = 1.0

logger = logging.getLogger(__name__)


class AppendOnlyFile:
    """NOTE: a server that cannot write its file takes no changes at all, so that no request would be admitted."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._watched_s = 0.0
        self._off_since_s: float | None = None

    async def watch(self) -> None:
        """Call it often, of the one process that runs the server. Raises `OSError` where the server does not answer."""
        now_s = time.monotonic()
        if now_s - self._watched_s < WATCH_EVERY_S:
            return
        self._watched_s = now_s
        state = await ask(self._socket, "INFO persistence")
        # Not only of a server that was told to write it: one that is started anew does so by itself.
        if b"aof_enabled:1" in state and b"aof_last_write_status:err" in state:
            await ask(self._socket, "CONFIG SET appendonly no")
            self._off_since_s = now_s
            logger.error("the private server cannot write its file and goes on without it: is the disk full?")
        elif self._off_since_s is not None and now_s - self._off_since_s >= AGAIN_AFTER_S:
            await ask(self._socket, "CONFIG SET appendonly yes")
            self._off_since_s = None


async def ask(socket: Path, command: str) -> bytes:
    """The reply's text, which may be of an error. Raises `OSError` where there is none in time."""
    async with asyncio.timeout(ASK_S):
        reader, writer = await asyncio.open_unix_connection(socket)
        try:
            writer.write(f"{command}\r\n".encode())
            reply = await reader.readline()
            if reply.startswith(b"$"):
                reply = await reader.readexactly(int(reply[1:]))
            return reply
        finally:
            writer.close()

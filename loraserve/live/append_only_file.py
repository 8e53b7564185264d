"""Lets the private server go on without its append-only file on a full disk: all of its data can be rebuilt."""

import asyncio
import logging
import time
from pathlib import Path

WATCH_EVERY_S = 1.0
REENABLE_AFTER_S = 60.0
"""How long the server runs without its file before the file is turned on again."""
COMMAND_TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


class AppendOnlyFile:
    """NOTE: a server that cannot write its file refuses all changes, so no request would be admitted."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._watched_s = 0.0
        self._off_since_s: float | None = None

    async def watch(self) -> None:
        """Call it often, in the process that runs the server. Raises `OSError` if the server does not answer."""
        now_s = time.monotonic()
        if now_s - self._watched_s < WATCH_EVERY_S:
            return
        self._watched_s = now_s
        state = await send_command(self._socket, "INFO persistence")
        # Checked even after the file was turned off here: a restarted server turns it on again by itself.
        if b"aof_enabled:1" in state and b"aof_last_write_status:err" in state:
            await send_command(self._socket, "CONFIG SET appendonly no")
            self._off_since_s = now_s
            logger.error(
                "the private server cannot write its append-only file and continues without it: is the disk full?"
            )
        elif self._off_since_s is not None and now_s - self._off_since_s >= REENABLE_AFTER_S:
            await send_command(self._socket, "CONFIG SET appendonly yes")
            self._off_since_s = None


async def send_command(socket: Path, command: str) -> bytes:
    """The reply's text, which may be an error. Raises `OSError` if there is no reply in time."""
    async with asyncio.timeout(COMMAND_TIMEOUT_S):
        reader, writer = await asyncio.open_unix_connection(socket)
        try:
            writer.write(f"{command}\r\n".encode())
            reply = await reader.readline()
            if reply.startswith(b"$"):
                reply = await reader.readexactly(int(reply[1:]))
            return reply
        finally:
            writer.close()

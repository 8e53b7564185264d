"""Socket pairs to our child processes."""

import contextlib
import socket

BUFFER_BYTES = 1 << 20


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Each end buffers 1 MiB, or as much as the system allows: sending a larger message waits for its reader.

    NOTE: an engine waits within its step. With macOS's default of 8 KiB it would wait for every larger message.
    """
    ends = socket.socketpair()
    for end in ends:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            if end.getsockopt(socket.SOL_SOCKET, option) < BUFFER_BYTES:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    return ends

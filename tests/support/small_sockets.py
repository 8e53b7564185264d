"""Socket pairs with buffers as small as on macOS."""

import socket

MACOS_BYTES = 8 * 1024
make_pair = socket.socketpair


def buffer_sizes(end: socket.socket) -> list[int]:
    return [end.getsockopt(socket.SOL_SOCKET, option) for option in (socket.SO_SNDBUF, socket.SO_RCVBUF)]


def small_pair(size_bytes: int = MACOS_BYTES) -> tuple[socket.socket, socket.socket]:
    """Replaces `socket.socketpair`."""
    ends = make_pair()
    for end in ends:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, size_bytes)
    return ends


def sizes_of(ends: tuple[socket.socket, socket.socket]) -> list[int]:
    """Buffer sizes of both ends, which it closes."""
    with ends[0], ends[1]:
        return [*buffer_sizes(ends[0]), *buffer_sizes(ends[1])]

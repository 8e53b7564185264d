import socket

import pytest

from loraserve.serving.process import socket_pairs
from loraserve.serving.process.socket_pairs import socket_pair
from tests.support.small_sockets import MACOS_BYTES, make_pair, sizes_of, small_pair


def test_small_buffers_are_enlarged_as_far_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = sizes_of(small_pair(socket_pairs.BUFFER_BYTES))
    monkeypatch.setattr(socket, "socketpair", small_pair)
    assert sizes_of(socket_pair()) == largest


def test_buffers_that_are_large_enough_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sizes_of(small_pair())
    monkeypatch.setattr(socket, "socketpair", small_pair)
    monkeypatch.setattr(socket_pairs, "BUFFER_BYTES", MACOS_BYTES)
    assert sizes_of(socket_pair()) == before


def test_a_system_that_refuses_larger_buffers_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(socket.socket):
        def setsockopt(self, *_: object) -> None:
            raise OSError(105, "No buffer space available")

    monkeypatch.setattr(socket, "socketpair", lambda: tuple(Full(fileno=end.detach()) for end in make_pair()))
    assert min(sizes_of(socket_pair())) > 0

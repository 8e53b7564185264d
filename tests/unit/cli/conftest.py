import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def refusing_port() -> Iterator[int]:
    """A port that is bound, so that no other process gets it, but has no listener."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def refusing_port() -> Iterator[int]:
    """Bound, so that nobody else gets it, but not listened to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]

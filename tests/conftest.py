"""For all tests: what they import is not walked by the garbage collector again and again, and no client reads the list
of certificate authorities, as no test leaves this machine."""

import atexit
import gc
from collections.abc import Generator, Iterator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collecting tests/inference, integration and e2e takes 10.5 s of a core, and took 15.6 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # Else nanobind takes what is frozen at the very end for lost.
        atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def _no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each new `httpx.Client` would read them all, in 25 ms, and there is one for every call of `httpx.get`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("no-authorities")))
        yield

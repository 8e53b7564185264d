"""For all tests: no client reads the list of certificate authorities, as no test leaves this machine."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each new `httpx.Client` would read them all, in 25 ms, and there is one for every call of `httpx.get`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("no-authorities")))
        yield

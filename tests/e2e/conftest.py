"""One real server on the demo model for all tests that leave it as they found it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import lorax as lorax_client
import openai
import pytest

from tests.support.server_process import WAIT_S, ServerProcess, serve, stop


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def server(data_dir: Path) -> Iterator[ServerProcess]:
    with serve(data_dir) as server:
        yield server
        assert server.process.poll() is None, server.text
        stop(server)


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S) as client:
        yield client


@pytest.fixture(scope="session")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def lorax(server: ServerProcess) -> Iterator[lorax_client.Client]:
    client = lorax_client.Client(server.url, timeout=int(WAIT_S))
    yield client
    if client.session is not None:
        client.session.close()

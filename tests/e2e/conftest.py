"""Real servers on the demo model, one with a chat template that shows tools, for tests that leave them unchanged."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import lorax as lorax_client
import openai
import pytest

from tests.support.server_process import WAIT_S, ServerProcess, serve, stop

TOOLS_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|user|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|end|>{% endfor %}<|assistant|>"
)


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
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TOOLS_TEMPLATE)
    with serve(tmp_path_factory.mktemp("data"), "--chat-template", str(template)) as server:
        yield server


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

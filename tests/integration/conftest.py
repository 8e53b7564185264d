"""Clients of a module's `server`, and what its fake engine answers."""

from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from tests.support.live_server import LiveServer


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0) as client:
        yield client


@pytest.fixture(params=[1, 3, 1000])
def answer(server: LiveServer, request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Sets the model's answers, which the module's TOKENIZER encodes, generated in steps of `request.param` tokens."""
    tokenizer = request.module.TOKENIZER

    def say(*texts: str, ended: bool = True, end: int = 1) -> None:
        token_ids = [tokenizer.encode(text, add_special_tokens=False).ids + [end] * ended for text in texts]
        server.engine.reply = lambda asked, index: token_ids[index]

    usual = server.engine.reply
    server.engine.tokens_per_step = request.param
    yield say
    server.engine.reply, server.engine.tokens_per_step = usual, 1

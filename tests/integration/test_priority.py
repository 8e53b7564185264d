"""`priority` reaches the engine from every endpoint whose requests have it."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loraserve.store.records import ClassifierRecord
from tests.support.fake_engine_client import FakeEngine, make_model, make_tokenizer
from tests.support.live_server import LiveServer, live_server, make_settings, register

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
INT32 = 2**31
TIERS = {"auto": 0, "default": 0, "flex": 1, "priority": -1}
WITHOUT_TIERS = ("/v1/messages", "/v1/embeddings", "/v1/classify", "/v1/rerank", "/v1/score")
"""Anthropic's tiers have other names, and the others' requests have none."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    engine = FakeEngine(model=make_model(make_tokenizer()))
    with live_server(engine, make_settings(tmp_path_factory.mktemp("data"))) as server:
        server.run(register(server.control, server.engine, "ranker", classifier=ClassifierRecord(num_labels=1)))
        yield server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {**CHAT, "max_tokens": 2}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/classify", {"model": "ranker", "input": "a"}),
        ("/v1/rerank", {"model": "ranker", "query": "a", "documents": ["b", "c"]}),
        ("/v1/score", {"model": "ranker", "text_1": "a", "text_2": ["b", "c"]}),
    ],
)
def test_every_prompt_has_the_priority_of_its_request(
    server: LiveServer, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    for given in (-INT32, 7, INT32 - 1):
        server.engine.requests.clear()
        response = http.post(path, json={"model": "tiny", **body, "priority": given})
        assert response.status_code == 200, response.text
        assert {request.priority for request in server.engine.requests} == {given}
    for neutral in ({}, {"priority": None}, {"priority": 0}):
        server.engine.requests.clear()
        assert http.post(path, json={"model": "tiny", **body, **neutral}).status_code == 200
        assert {request.priority for request in server.engine.requests} == {0}
    for tier, priority in TIERS.items():
        if path not in WITHOUT_TIERS:
            server.engine.requests.clear()
            assert http.post(path, json={"model": "tiny", **body, "service_tier": tier}).status_code == 200
            http.post(path, json={"model": "tiny", **body, "service_tier": tier, "priority": 9}).raise_for_status()
            assert {request.priority for request in server.engine.requests} == {priority, 9}
    for wrong, named in ((INT32, str(INT32)), (-INT32 - 1, str(-INT32 - 1)), (1.5, "priority"), ("1", "priority")):
        refused = http.post(path, json={"model": "tiny", **body, "priority": wrong})
        assert refused.status_code == 400
        assert named in refused.json()["error"]["message"]

"""Predicted outputs through the unmodified openai client and raw HTTP, with a fake engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.fake_engine_client import FakeEngine, make_model, make_tokenizer
from tests.support.live_server import LiveServer, live_server, make_settings

TOKENIZER = make_tokenizer()
TEXT = "hello world, said the user"
USER: Any = [{"role": "user", "content": "hi"}]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    engine = FakeEngine(model=make_model(TOKENIZER), reply=lambda request, index: [*encode(TEXT), 1])
    with live_server(engine, make_settings(tmp_path_factory.mktemp("data"))) as server:
        yield server


def ask(http: httpx.Client, prediction: object, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "messages": USER, "prediction": prediction, **fields}
    return http.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("content", [TEXT, [{"type": "text", "text": TEXT}]])
def test_the_engine_gets_the_predicted_tokens_and_usage_counts_the_accepted_ones(
    server: LiveServer, client: openai.OpenAI, content: Any
) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, prediction={"type": "content", "content": content}
    )
    assert answer.choices[0].message.content == TEXT
    assert server.engine.requests[-1].predicted_token_ids == encode(TEXT)
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (len(encode(TEXT)), 0)
    assert answer.usage.completion_tokens == len(encode(TEXT)) + 1


def test_rejected_prediction_tokens_are_not_counted_as_completion_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, prediction={"type": "content", "content": "hello there"}
    )
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    num_same = sum(a == b for a, b in zip(encode("hello there"), encode(TEXT), strict=False))
    assert details.accepted_prediction_tokens == num_same
    assert details.rejected_prediction_tokens == len(encode("hello there")) - num_same > 0
    assert answer.usage.completion_tokens == len(encode(TEXT)) + 1


def test_streams_end_with_the_same_usage(client: openai.OpenAI) -> None:
    chunks = [
        *client.chat.completions.create(
            model="tiny",
            messages=USER,
            prediction={"type": "content", "content": TEXT},
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens == len(encode(TEXT))


def test_usage_without_a_prediction_has_no_prediction_counts(server: LiveServer, http: httpx.Client) -> None:
    for fields in ({}, {"prediction": None}):
        usage = http.post("/v1/chat/completions", json={"model": "tiny", "messages": USER, **fields}).json()["usage"]
        assert "completion_tokens_details" not in usage
        assert server.engine.requests[-1].predicted_token_ids == []


def test_an_empty_prediction_predicts_nothing(http: httpx.Client) -> None:
    response = ask(http, {"type": "content", "content": ""})
    assert response.status_code == 200
    assert "completion_tokens_details" not in response.json()["usage"]


@pytest.mark.parametrize(
    ("prediction", "param", "shown"),
    [
        ({"type": "text", "content": "a"}, "prediction.type", "'text'; only 'content'"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]", "'image_url'"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text", "missing"),
        ({"type": "content", "content": "0 " * 300}, "prediction", "tokens; the limit is 512"),
    ],
)
def test_errors_name_the_invalid_field(http: httpx.Client, prediction: object, param: str, shown: str) -> None:
    response = ask(http, prediction)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert shown in error["message"]


@pytest.mark.parametrize("prediction", ["text", {"type": "content"}, {"content": "a"}, {"type": "content", "more": 1}])
def test_malformed_predictions_are_refused(http: httpx.Client, prediction: object) -> None:
    response = ask(http, prediction)
    assert response.status_code == 400
    assert "prediction" in response.json()["error"]["message"]


def test_predictions_are_refused_without_speculative_decoding(tmp_path: Path) -> None:
    engine = FakeEngine(model=make_model(TOKENIZER, num_speculative_tokens=0))
    with live_server(engine, make_settings(tmp_path)) as server, httpx.Client(base_url=server.url) as http:
        response = ask(http, {"type": "content", "content": "a"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "prediction")
    assert "speculative decoding" in error["message"]

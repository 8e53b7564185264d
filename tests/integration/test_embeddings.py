"""/v1/embeddings through the unmodified openai client and raw HTTP, with a fake engine."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from loraserve.api.routes.pooled import MAX_AT_ONCE
from loraserve.engine.request import EngineErrorCode, EngineRequest, FinishReason, Pooling, PoolingParams
from loraserve.serving.settings import RequestLimits
from tests.support.fake_engine_client import HIDDEN_SIZE, FakeEngine, make_model, make_tokenizer, vector_of
from tests.support.live_server import LiveServer, live_server, make_settings

TOKENIZER = make_tokenizer()
BOS = 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Base "tiny", adapters "sql" and "shout"."""
    with live_server(FakeEngine(), make_settings(tmp_path_factory.mktemp("data")), ("sql", "shout")) as server:
        yield server


def tokens_of(text: str) -> list[int]:
    return [BOS, *TOKENIZER.encode(text, add_special_tokens=False).ids]


def newest(server: LiveServer, count: int = 1) -> list[EngineRequest]:
    return server.engine.requests[-count:]


def post(server: LiveServer, body: dict[str, Any]) -> httpx.Response:
    """For the base model, unless the body names another."""
    return httpx.post(f"{server.url}/v1/embeddings", json={"model": "tiny"} | body, timeout=30)


class TestAnswers:
    def test_an_answer_has_openais_shape_and_the_engines_vectors(
        self, client: openai.OpenAI, server: LiveServer
    ) -> None:
        answer = client.embeddings.create(model="sql", input=["hello world", "hi"])
        assert (answer.object, answer.model) == ("list", "sql")
        assert [(item.object, item.index) for item in answer.data] == [("embedding", 0), ("embedding", 1)]
        num_tokens = len(tokens_of("hello world")) + len(tokens_of("hi"))
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
        asked = {tuple(request.prompt_token_ids): request for request in newest(server, 2)}
        for item, text in zip(answer.data, ("hello world", "hi"), strict=True):
            request = asked[tuple(tokens_of(text))]
            assert item.embedding == vector_of(request).tolist()
            assert request.pooling == PoolingParams(Pooling.LAST)

    def test_both_encodings_carry_the_same_numbers(self, client: openai.OpenAI, server: LiveServer) -> None:
        numbers = client.embeddings.create(model="sql", input="hi", encoding_format="float")
        encoded = client.embeddings.create(model="sql", input="hi", encoding_format="base64")
        assert isinstance(encoded.data[0].embedding, str)
        as_client_asks = client.embeddings.create(model="sql", input="hi")  # it requests base64 and decodes it
        assert numbers.data[0].embedding == as_client_asks.data[0].embedding == vector_of(newest(server)[0]).tolist()

    def test_request_fields_reach_the_engine(self, client: openai.OpenAI, server: LiveServer) -> None:
        extra = {"pooling": "mean", "normalize": False, "cache_salt": "mine"}
        answer = client.embeddings.create(model="shout", input=[7, 8], dimensions=3, extra_body=extra)
        (request,) = newest(server)
        assert request.prompt_token_ids == [7, 8]
        assert request.pooling == PoolingParams(Pooling.MEAN, 3, normalize=False)
        assert request.cache_salt.endswith(":mine")
        assert len(answer.data[0].embedding) == 3

    def test_null_means_the_default(self, server: LiveServer) -> None:
        names = ("dimensions", "pooling", "normalize", "encoding_format", "add_special_tokens", "cache_salt", "user")
        answer = post(server, {"input": "hi", **dict.fromkeys((*names, "truncate_prompt_tokens", "priority"))})
        assert answer.status_code == 200, answer.text
        assert newest(server)[0].pooling == PoolingParams(Pooling.LAST)

    def test_each_model_name_has_its_own_vectors(self, server: LiveServer) -> None:
        def vector(model: str) -> list[float]:
            return post(server, {"input": "hi", "model": model}).json()["data"][0]["embedding"]

        by_path = httpx.post(f"{server.url}/adapters/sql/v1/embeddings", json={"input": "hi"})
        assert by_path.json()["data"][0]["embedding"] == vector("sql") == vector("tiny:sql@v1")
        assert len({*map(tuple, map(vector, ("tiny", "sql", "shout")))}) == 3

    def test_headers_and_the_request_log_describe_the_request(self, server: LiveServer) -> None:
        answer = post(server, {"model": "sql", "input": "hi"})
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-adapter-version"] == "1"
        assert float(answer.headers["x-ttft-ms"]) > 0
        request_id = answer.headers["x-request-id"]
        item = httpx.get(f"{server.url}/v1/requests/{request_id}").json()
        assert (item["route"], item["state"]) == ("embeddings", "stop")
        assert (item["num_prompt_tokens"], item["num_output_tokens"]) == (len(tokens_of("hi")), 0)

    def test_the_number_of_inputs_in_the_engine_at_once_is_limited(self, tmp_path: Path) -> None:
        most_running = 0

        class Counting(FakeEngine):
            def _check_step(self, request: EngineRequest, step: int) -> None:
                nonlocal most_running
                most_running = max(most_running, len(self.running))
                super()._check_step(request, step)

        texts = [f"number {index}" for index in range(5 * MAX_AT_ONCE)]
        with live_server(Counting(step_s=0.001), make_settings(tmp_path)) as server:
            answer = post(server, {"input": texts}).json()
            by_prompt = {tuple(each.prompt_token_ids): vector_of(each).tolist() for each in server.engine.requests}
        assert [item["embedding"] for item in answer["data"]] == [by_prompt[tuple(tokens_of(text))] for text in texts]
        assert most_running == MAX_AT_ONCE


class TestTruncation:
    def test_the_beginning_is_kept_including_tokens_that_the_tokenizer_adds(self, server: LiveServer) -> None:
        post(server, {"input": "hello world", "truncate_prompt_tokens": 3}).raise_for_status()
        assert newest(server)[0].prompt_token_ids == tokens_of("hello world")[:3]
        post(server, {"input": [5, 6, 7], "truncate_prompt_tokens": 2}).raise_for_status()
        assert newest(server)[0].prompt_token_ids == [5, 6]
        body = {"input": ["hi", "x" * 5000], "truncate_prompt_tokens": -1, "add_special_tokens": False}
        post(server, body).raise_for_status()
        asked = sorted(newest(server, 2), key=lambda request: len(request.prompt_token_ids))
        assert asked[0].prompt_token_ids == tokens_of("hi")[1:]
        assert len(asked[1].prompt_token_ids) == make_model().max_model_len

    def test_an_input_may_be_as_long_as_the_context(self, server: LiveServer) -> None:
        max_model_len = make_model().max_model_len
        assert post(server, {"input": [9] * max_model_len}).status_code == 200
        refused = post(server, {"input": [[9], [9] * (max_model_len + 1)]})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        assert "512 tokens, but 'input[1]' has 513" in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "Missing required parameter"),
        ({"input": ""}, "input", None),
        ({"input": []}, "input", "is empty"),
        ({"input": [[]]}, "input", "has no tokens"),
        ({"input": ["a", ""], "add_special_tokens": False}, "input", "'input[1]' has no tokens"),
        ({"input": ["a", 1]}, "input", "mixes texts and token ids"),
        ({"input": [10**6]}, "input", "contains token id 1000000"),
        ({"input": ["a"] * 2049}, "input", "has 2049 inputs; the limit is 2048"),
        ({"input": "a", "dimensions": 0}, "dimensions", f"is 0; it must be between 1 and {HIDDEN_SIZE}"),
        ({"input": "a", "dimensions": 9}, "dimensions", f"is 9; it must be between 1 and {HIDDEN_SIZE}"),
        ({"input": "a", "pooling": "cls"}, "pooling", "is 'cls'; it must be 'last' or 'mean'"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "is 'int8'; it must be 'float' or 'base64'"),
        ({"input": "a", "encoding_format": 8}, "encoding_format", "Invalid type"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "is 0; it must be between 1 and 512"),
        ({"input": "a", "priority": 2**31}, "priority", "must be between -2147483648 and 2147483647"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "is 0; it must be between 1 and 256"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "Send their text with 'input'"),
        ({"input": "a", "temperature": 0}, "temperature", "Unknown parameter"),
        ({"input": "a", "model": "nope"}, "model", "does not exist"),
    ],
)
def test_invalid_requests_are_refused_and_name_the_parameter(
    server: LiveServer, body: dict[str, Any], param: str, message: str | None
) -> None:
    num_requests = len(server.engine.requests)
    if message is None:  # the cases that need a tokenizer that adds nothing
        body = {**body, "add_special_tokens": False}
        message = "has no tokens"
    answer = post(server, body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert error["param"] == param
    assert message in error["message"]
    assert len(server.engine.requests) == num_requests


def test_pooling_is_required_if_the_models_files_specify_an_unsupported_one(tmp_path: Path) -> None:
    engine = FakeEngine(model=make_model(default_pooling=None))
    with live_server(engine, make_settings(tmp_path)) as server:
        refused = post(server, {"input": "a"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pooling")
        assert post(server, {"input": "a", "pooling": "mean"}).status_code == 200


def test_the_models_own_pooling_is_the_default(tmp_path: Path) -> None:
    engine = FakeEngine(model=make_model(default_pooling=Pooling.MEAN))
    with live_server(engine, make_settings(tmp_path)) as server:
        assert post(server, {"input": "a"}).status_code == 200
        assert newest(server)[0].pooling == PoolingParams(Pooling.MEAN)


def test_a_headless_model_cannot_generate_text(tmp_path: Path) -> None:
    engine = FakeEngine(model=make_model(is_headless=True))
    with live_server(engine, make_settings(tmp_path)) as server:
        assert post(server, {"input": "a"}).status_code == 200
        num_requests = len(engine.requests)
        for path, asked in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
        ):
            refused = httpx.post(f"{server.url}{path}", json={"model": "tiny", **asked})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model"), path
            assert "without an lm_head" in refused.json()["error"]["message"]
        refused = httpx.post(f"{server.url}/generate", json={"inputs": "a"})
        assert (refused.status_code, "without an lm_head" in refused.text) == (422, True)
        assert len(engine.requests) == num_requests


def test_the_numbers_in_one_answer_are_limited(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, limits=RequestLimits(max_pooled_values=3 * HIDDEN_SIZE))
    with live_server(FakeEngine(), settings) as server:
        assert post(server, {"input": ["a"] * 3}).status_code == 200
        assert post(server, {"input": ["a"] * 6, "dimensions": 4}).status_code == 200
        error = post(server, {"input": ["a"] * 4}).json()["error"]
        assert error["param"] == "input"
        assert "would be answered with 32 numbers; the limit is 24" in error["message"]


def test_non_finite_numbers_are_an_error(tmp_path: Path) -> None:
    class Failing(FakeEngine):
        def _reply_outputs(self, request: EngineRequest, index: int) -> list[Any]:
            (output,) = super()._reply_outputs(request, index)
            output.error, output.error_code = "the model produced no numbers", EngineErrorCode.NOT_FINITE
            output.finish_reason, output.pooled = FinishReason.ERROR, None
            return [output]

    with live_server(Failing(), make_settings(tmp_path)) as server:
        answer = post(server, {"input": ["a", "b"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_finite")


def test_a_client_disconnect_aborts_its_work(tmp_path: Path) -> None:
    with live_server(FakeEngine(step_s=60), make_settings(tmp_path)) as server:
        with contextlib.closing(http.client.HTTPConnection(urlsplit(server.url).netloc)) as connection:
            body = json.dumps({"model": "tiny", "input": ["a", "b"]})
            connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
            server.wait_until(lambda: len(server.engine.running) == 2)
        server.wait_until(lambda: len(server.engine.aborted) == 2)

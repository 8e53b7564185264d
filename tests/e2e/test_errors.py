"""Errors for wrong requests: they name the field, the value and the limit, and never give another model's answer."""

import json
import socket
from typing import Any

import httpx
import openai
import pytest

from tests.support.demo_questions import ADAPTERS, BASE, templated, user
from tests.support.server_process import WAIT_S, ServerProcess, wait_until

PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_MODEL_LEN = 1024
VOCAB_SIZE = 261
MAX_BODY_BYTES = 2_000_000
INT64_MAX = 2**63 - 1
JSON = {"content-type": "application/json"}


def request_to(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": user("x")}
    return {"model": "spell", **asked, **fields}


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["code"], str)
    return error


class TestModel:
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize(
        "model",
        ["nope", "Spell", "spell ", f"{BASE}:nope", f"{BASE}:", f":{BASE}", "nope:spell", "spell:spell", "x" * 9999],
    )
    def test_an_unknown_model_name_never_falls_back_to_the_base(
        self, http: httpx.Client, path: str, model: str
    ) -> None:
        response = http.post(path, json=request_to(path, model=model))
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert model[:256] in error["message"]
        assert not any(adapter in error["message"].replace(model[:256], "") for adapter in ADAPTERS)

    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("fields", [{"model": ""}, {"model": None}, {}])
    def test_a_missing_model_name_never_falls_back_to_the_base(
        self, http: httpx.Client, path: str, fields: dict[str, Any]
    ) -> None:
        body = {name: value for name, value in request_to(path).items() if name != "model"}
        response = http.post(path, json={**body, **fields})
        error = error_of(response)
        assert (response.status_code, error["param"]) == (400, "model")
        assert "/v1/models" in error["message"]

    @pytest.mark.parametrize("adapter", ["nope", "Spell", BASE, "a" * 500])
    def test_the_base_url_of_an_unknown_adapter_is_not_found(self, http: httpx.Client, adapter: str) -> None:
        assert http.get(f"/adapters/{adapter}/v1/models").status_code == 404
        assert http.post(f"/adapters/{adapter}/v1/completions", json={"prompt": "x"}).status_code == 404


class TestFields:
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize(
        ("field", "value", "limit"),
        [
            ("temperature", -0.1, "between 0 and 2"),
            ("temperature", 2.5, "between 0 and 2"),
            ("top_p", 0, "greater than 0"),
            ("top_p", 1.1, "between 0 and 1"),
            ("top_k", -2, "-1"),
            ("min_p", 1.5, "between 0 and 1"),
            ("presence_penalty", 2.1, "between -2 and 2"),
            ("frequency_penalty", -2.1, "between -2 and 2"),
            ("repetition_penalty", 0.001, "between 0.01 and 10"),
            ("n", 0, "between 1 and 8"),
            ("n", 9, "between 1 and 8"),
            ("seed", 2**63, str(INT64_MAX)),
            ("max_tokens", -1, "at least 1"),
            ("min_tokens", -1, "between 0 and"),
            ("min_tokens", 2000, str(MAX_MODEL_LEN)),
            ("prompt_logprobs", 21, "between 0 and 20"),
            ("truncate_prompt_tokens", 0, str(MAX_MODEL_LEN)),
            ("truncate_prompt_tokens", MAX_MODEL_LEN + 1, str(MAX_MODEL_LEN)),
        ],
    )
    def test_numbers_out_of_range_are_refused_with_the_limit(
        self, http: httpx.Client, path: str, field: str, value: float, limit: str
    ) -> None:
        response = http.post(path, json=request_to(path, **{field: value}))
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", field)
        assert field in error["message"]
        assert str(value) in error["message"]
        assert limit in error["message"]

    @pytest.mark.parametrize(
        ("path", "field", "value", "shown"),
        [
            ("/v1/completions", "logprobs", 21, ("21", "20")),
            ("/v1/chat/completions", "top_logprobs", 21, ("21", "20")),
            ("/v1/completions", "logit_bias", {"5": 101}, ("101", "100")),
            ("/v1/completions", "logit_bias", {str(VOCAB_SIZE): 1}, (str(VOCAB_SIZE), str(VOCAB_SIZE - 1))),
            ("/v1/completions", "logit_bias", {"five": 1}, ("five",)),
            ("/v1/completions", "stop", list("abcdefghijklmnopq"), ("17", "16")),
            ("/v1/completions", "stop", "s" * 257, ("257", "256")),
            ("/v1/completions", "stop", "", ("empty",)),
            ("/v1/completions", "stop_token_ids", [VOCAB_SIZE], (str(VOCAB_SIZE), str(VOCAB_SIZE - 1))),
            ("/v1/completions", "stop_token_ids", [-1], ("-1", str(VOCAB_SIZE - 1))),
            ("/v1/completions", "allowed_token_ids", [VOCAB_SIZE], (str(VOCAB_SIZE), str(VOCAB_SIZE - 1))),
            ("/v1/completions", "allowed_token_ids", [], ("empty",)),
            ("/v1/completions", "prompt", [VOCAB_SIZE], (str(VOCAB_SIZE), str(VOCAB_SIZE - 1))),
            ("/v1/completions", "prompt", ["x"] * 65, ("65", "64")),
            ("/v1/completions", "prompt", [], ("prompt",)),
            ("/v1/completions", "prompt", "", ("no tokens",)),
            ("/v1/chat/completions", "messages", [], ("empty",)),
            ("/v1/completions", "cache_salt", "", ("0", "1")),
            ("/v1/completions", "stream_options", {"include_usage": True}, ("stream",)),
        ],
    )  # fmt: skip
    def test_lists_and_texts_out_of_range_are_refused_with_the_limit(
        self, http: httpx.Client, path: str, field: str, value: object, shown: tuple[str, ...]
    ) -> None:
        response = http.post(path, json=request_to(path, **{field: value}))
        error = error_of(response)
        assert (response.status_code, error["param"]) == (400, field)
        assert all(part in error["message"] for part in shown), error["message"]

    @pytest.mark.parametrize(
        "number",
        ["NaN", "Infinity", "-Infinity", "1e400", "1" * 400, "-" + "9" * 5000, "1e999999999", '"1"', "true", "[]"],
    )
    def test_hostile_numbers_are_refused_with_a_short_message(self, http: httpx.Client, number: str) -> None:
        for field in ("temperature", "n", "seed", "top_k", "max_tokens", "logprobs"):
            body = json.dumps(request_to("/v1/completions", **{field: "@"})).replace('"@"', number)
            response = http.post("/v1/completions", content=body, headers=JSON)
            assert response.status_code == 400, (field, response.text)
            assert len(error_of(response)["message"]) < 300

    @pytest.mark.parametrize("path", PATHS)
    def test_unknown_and_unsupported_fields_are_named(self, http: httpx.Client, path: str) -> None:
        for field, value, code in (
            ("tempature", 1, "unknown_parameter"),
            ("guided_decoding_backend", "other", "unsupported_parameter"),
            ("use_beam_search", True, "unsupported_parameter"),
            ("store", True, "unsupported_parameter"),
        ):
            response = http.post(path, json=request_to(path, **{field: value}))
            error = error_of(response)
            assert (response.status_code, error["code"], error["param"]) == (400, code, field)
            assert field in error["message"]

    def test_tools_and_images_are_refused_by_name(self, client: openai.OpenAI) -> None:
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        with pytest.raises(openai.BadRequestError, match="tool"):
            client.chat.completions.create(model="spell", messages=user("x"), tools=tools)  # pyright: ignore
        image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        with pytest.raises(openai.BadRequestError, match="image_url"):
            client.chat.completions.create(model="spell", messages=image)

    def test_a_role_unknown_to_the_template_is_refused(self, client: openai.OpenAI) -> None:
        for turn in ({"role": "tool", "tool_call_id": "x"}, {"role": "function"}, {"role": "wizard"}):
            turns: Any = [{**turn, "content": "x"}]
            with pytest.raises(openai.BadRequestError, match="role"):
                client.chat.completions.create(model="spell", messages=turns)


class TestContext:
    @pytest.mark.parametrize(
        ("fields", "shown"),
        [
            ({"prompt": [5] * 2000}, "2000"),
            ({"prompt": "x" * 5000}, "5000"),
            ({"prompt": [5] * MAX_MODEL_LEN}, "1024"),
            ({"max_tokens": MAX_MODEL_LEN}, "1024"),
            ({"max_tokens": 10**9}, "1000000000"),
            ({"prompt": ["x", "x" * 2000]}, "2000"),
        ],
    )
    def test_a_request_that_exceeds_the_context_is_refused_with_the_numbers(
        self, client: openai.OpenAI, fields: dict[str, Any], shown: str
    ) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**request_to("/v1/completions", **fields))
        assert caught.value.code == "context_length_exceeded"
        assert str(MAX_MODEL_LEN) in caught.value.message
        assert shown in caught.value.message

    def test_the_last_token_that_fits_is_generated(self, client: openai.OpenAI) -> None:
        full = client.completions.create(model="spell", prompt=[ord("x")] * (MAX_MODEL_LEN - 1), max_tokens=1)
        assert full.usage is not None
        assert full.usage.total_tokens == MAX_MODEL_LEN
        short_of_room = client.completions.create(
            model="spell", prompt=[ord("x")] * (MAX_MODEL_LEN - 5), extra_body={"ignore_eos": True}
        )
        assert short_of_room.usage is not None
        assert short_of_room.usage.completion_tokens == 5


class TestBodies:
    @pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize", "/v1/load_lora_adapter"])
    @pytest.mark.parametrize("body", [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"{} trailing", b"{'a': 1}"])
    def test_a_body_that_is_not_a_json_object_is_refused(self, http: httpx.Client, path: str, body: bytes) -> None:
        response = http.post(path, content=body, headers=JSON)
        assert response.status_code == 400
        assert error_of(response)["type"] == "invalid_request_error"

    @pytest.mark.parametrize(
        "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
    )
    def test_content_types_that_a_web_page_can_send_without_preflight_are_refused(
        self, http: httpx.Client, content_type: str
    ) -> None:
        body = json.dumps(request_to("/v1/completions"))
        response = http.post("/v1/completions", content=body, headers={"content-type": content_type})
        assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
        assert "application/json" in error_of(response)["message"]

    def test_a_body_that_is_too_large_is_refused(self, http: httpx.Client) -> None:
        body = json.dumps(request_to("/v1/completions", prompt="x" * MAX_BODY_BYTES))
        response = http.post("/v1/completions", content=body, headers=JSON)
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
        assert str(MAX_BODY_BYTES) in error_of(response)["message"]
        chunks = (b" " * 100_000 for _ in range(100))
        assert http.post("/v1/completions", content=chunks, headers=JSON).status_code == 413

    @pytest.mark.parametrize("field", ["metadata", "prompt", "messages", "stop", "tools", "surprise"])
    @pytest.mark.parametrize("opening", ["[", '{"a":'])
    def test_nesting_that_is_too_deep_is_refused_with_a_short_message(
        self, http: httpx.Client, field: str, opening: str
    ) -> None:
        depth = 100_000
        closing = "]" if opening == "[" else "}"
        nested = opening * depth + "1" + closing * depth
        body = f'{{"model": "spell", "{field}": {nested}}}'
        for path in PATHS:
            response = http.post(path, content=body, headers=JSON)
            assert response.status_code == 400
            assert len(error_of(response)["message"]) < 300


class TestRoutes:
    def test_unknown_routes_and_methods_are_refused(self, http: httpx.Client) -> None:
        for path in ("/v1", "/v1/nothing", "/v1/chat", "/v1/completions/", "/admin", "/v1/embeddings"):
            response = http.get(path)
            assert response.status_code in (404, 405), path
            assert error_of(response)["code"] in ("not_found", "method_not_allowed")
        for method, path in (("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("PUT", "/tokenize"), ("PUT", "/")):
            response = http.request(method, path, headers=JSON)
            assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
            assert response.headers["allow"]

    def test_an_unknown_query_parameter_of_a_management_route_is_named(self, http: httpx.Client) -> None:
        mistyped = http.get("/v1/adapters", params={"limti": 1})
        error = error_of(mistyped)
        assert (mistyped.status_code, error["code"], error["param"]) == (400, "unknown_parameter", "limti")
        assert "q, tag, state, sort, limit, cursor" in error["message"]
        nothing = http.patch("/v1/adapters/spell", params={"dry_run": "true"}, json={"tags": ["mine"]})
        assert (nothing.status_code, error_of(nothing)["param"]) == (400, "dry_run")
        assert http.get("/v1/adapters/spell").json()["tags"] == []
        assert http.get("/v1/usage", params={"interval": "total", "format": "csv"}).status_code == 200

    @pytest.mark.parametrize("path", ["/health", "/v1/models"])
    def test_other_routes_accept_unknown_query_parameters(self, http: httpx.Client, path: str) -> None:
        assert http.get(path, params={"api-version": "2026-01-01"}).status_code == 200
        asked = request_to("/v1/completions", max_tokens=1)
        assert http.post("/v1/completions", params={"api-version": "2026-01-01"}, json=asked).status_code == 200

    def test_request_ids_are_returned_even_with_errors(self, http: httpx.Client) -> None:
        for path, status in (("/health", 200), ("/nothing", 404), ("/v1/completions", 405)):
            response = http.get(path, headers={"x-request-id": "mine-1.2:3"})
            assert (response.status_code, response.headers["x-request-id"]) == (status, "mine-1.2:3")
        asked = {
            "content": json.dumps(request_to("/v1/completions", max_tokens=1)),
            "headers": {**JSON, "x-request-id": "me"},
        }
        answer = http.post("/v1/completions", **asked)  # pyright: ignore
        assert (answer.json()["id"], answer.headers["x-request-id"]) == ("cmpl-me", "me")

    @pytest.mark.parametrize("header", ["Bearer wrong", "Basic eDp5", "", "garbage", "Bearer " + "x" * 4000])
    def test_a_server_without_keys_ignores_any_authorization(self, http: httpx.Client, header: str) -> None:
        assert http.get("/v1/models", headers={"authorization": header}).status_code == 200

    def test_requests_from_other_web_sites_are_refused(self, http: httpx.Client) -> None:
        for headers in (
            {"host": "evil.example"},
            {"origin": "https://evil.example"},
            {"sec-fetch-site": "cross-site"},
        ):
            response = http.get("/v1/models", headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (403, "forbidden")

    def test_broken_http_gets_a_4xx_response_and_the_server_stays_healthy(
        self, server: ServerProcess, http: httpx.Client
    ) -> None:
        port = httpx.URL(server.url).port
        for request in (
            b"garbage\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
                connection.sendall(request)
                assert connection.recv(100).startswith(b"HTTP/1.1 4")
        assert http.get("/health").status_code == 200


def test_errors_raise_the_openai_clients_own_exceptions(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="x")
    assert (missing.value.code, missing.value.param, missing.value.type) == (
        "model_not_found",
        "model",
        "not_found_error",
    )
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="spell", prompt="x", temperature=9)
    assert (bad.value.code, bad.value.param, bad.value.type) == (
        "invalid_value",
        "temperature",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(model="spell", input="x")
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="spell", prompt="x" * MAX_BODY_BYTES)
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError):
        # Errors before a stream starts are plain responses, too.
        client.chat.completions.create(model="spell", messages=user("x" * 2000), stream=True)  # pyright: ignore


def test_the_server_still_works_after_all_wrong_requests(server: ServerProcess, client: openai.OpenAI) -> None:
    wait_until(server.is_idle, "nothing runs")
    completion = client.completions.create(model="spell", prompt=templated("cat"), temperature=0)
    assert completion.choices[0].text == "c-a-t"
    assert "Traceback" not in server.text

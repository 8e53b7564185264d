"""The unmodified openai client, and raw HTTP, against the app behind a real uvicorn, with a fake engine."""

import asyncio
import base64
import gzip
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraserve.api.inference.call import salted
from loraserve.api.routes import completions
from loraserve.engine.request import EngineErrorCode, EngineRequest, EngineStats
from loraserve.serving.settings import RequestLimits
from loraserve.serving.text.tokenizer import TextTokenizer
from tests.support.fake_engine_client import FakeEngine, make_model, make_tokenizer
from tests.support.live_server import LiveServer, digest_of, live_server, make_settings, tenant_of

TOKENIZER = make_tokenizer()
TEXT = "hello world 🙂 STOP here, said the naïve user 東京, and more: 0123456789 {json}"
USER = [{"role": "user", "content": "hi"}]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def says(text: str, end: bool = True) -> FakeEngine:
    """An engine that answers every choice with `text`."""
    token_ids = encode(text) + ([1] if end else [])
    return FakeEngine(model=make_model(TOKENIZER), reply=lambda request, index: token_ids)


@pytest.fixture(scope="module")
def module_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def server(module_stack: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    """Answers TEXT; base "tiny", adapters "sql" and "shout"."""
    served = make_settings(tmp_path_factory.mktemp("data"))
    return module_stack.enter_context(live_server(says(TEXT), served, ("sql", "shout")))


def events(body: str) -> list[Any]:
    """The data of an SSE body; checks for [DONE] and leaves it out."""
    blocks = [block for block in body.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    assert "data: [DONE]" not in blocks[:-1]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def noting(work: Callable[..., Any], on_loop: list[bool]) -> Callable[..., Any]:
    """Wraps `work` to record whether each call runs on an event loop."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            on_loop.append(False)
        else:
            on_loop.append(True)
        return work(*args, **kwargs)

    return noted


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return body["error"]


class TestModels:
    def test_base_names_are_listed_before_adapters(self, client: openai.OpenAI, server: LiveServer) -> None:
        cards = client.models.list().data
        assert [card.id for card in cards] == ["tiny", "org/tiny-alias", "shout", "sql"]
        base, sql = cards[0].to_dict(), cards[3].to_dict()
        assert (base["object"], base["parent"], base["root"], base["max_model_len"]) == ("model", None, "tiny", 512)
        assert (sql["parent"], sql["root"], sql["max_model_len"]) == ("tiny", digest_of("sql"), None)
        assert sql["adapter"] == {"rank": 8, "size_bytes": 4096, "digest": digest_of("sql"), "version": 1}
        assert base["permission"][0]["object"] == "model_permission"

    @pytest.mark.parametrize("name", ["tiny", "org/tiny-alias", "sql", "tiny:sql", "sql@v1", "tiny:sql@live"])
    def test_a_model_is_retrieved_by_any_of_its_names(self, client: openai.OpenAI, name: str) -> None:
        assert client.models.retrieve(name).id == name.removeprefix("tiny:")

    def test_model_names_can_be_paths(self, tmp_path: Path) -> None:
        names = ["/models/llama", "path/to/model/", "sq"]
        served = make_settings(tmp_path, served_model_names=names)
        with (
            live_server(says(TEXT), served, ("sql",)) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
        ):
            assert [card.id for card in client.models.list().data] == [*names, "sql"]
            for name in (*names, "sql"):
                assert client.models.retrieve(name).id == name
            assert client.models.retrieve("/models/llama:sql").id == "sql"
            assert httpx.get(f"{server.url}/v1/models/sql/").json()["id"] == "sql"

    def test_an_unknown_model_is_not_found(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("nope")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")

    def test_an_adapters_base_url_lists_only_that_adapter(self, server: LiveServer) -> None:
        with openai.OpenAI(base_url=f"{server.url}/adapters/sql/v1", api_key="x", max_retries=0) as client:
            assert [card.id for card in client.models.list().data] == ["sql"]
            assert client.models.retrieve("sql").id == "sql"
            for other in ("shout", "tiny", "nope"):
                with pytest.raises(openai.NotFoundError):
                    client.models.retrieve(other)


class TestCompletions:
    def test_response_shape(self, client: openai.OpenAI) -> None:
        completion = client.completions.create(model="sql", prompt="hi", max_tokens=100)
        choice = completion.choices[0]
        assert completion.id.startswith("cmpl-")
        assert (completion.object, completion.model) == ("text_completion", "sql")
        assert completion.system_fingerprint
        assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (TEXT, "stop", 0, None)
        assert choice.to_dict()["stop_reason"] is None
        usage = completion.usage
        assert usage is not None
        assert usage.completion_tokens == len(encode(TEXT)) + 1
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 0

    def test_max_tokens_defaults_to_sixteen(self, client: openai.OpenAI) -> None:
        completion = client.completions.create(model="tiny", prompt="hi")
        assert completion.choices[0].finish_reason == "length"
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 16
        short_of_room = client.completions.create(model="tiny", prompt=[9] * 510)
        assert short_of_room.usage is not None
        assert short_of_room.usage.completion_tokens == 2

    def test_token_id_prompts_reach_the_engine_unchanged(self, client: openai.OpenAI, server: LiveServer) -> None:
        client.completions.create(model="tiny", prompt=[[5, 6], [7]], max_tokens=1)
        assert sorted(request.prompt_token_ids for request in server.engine.requests[-2:]) == [[5, 6], [7]]
        client.completions.create(model="tiny", prompt=[8, 9], max_tokens=1)
        assert server.engine.requests[-1].prompt_token_ids == [8, 9]
        client.completions.create(model="tiny", prompt="hi", max_tokens=1)
        assert server.engine.requests[-1].prompt_token_ids == [0, *encode("hi")]
        client.completions.create(model="tiny", prompt="hi", max_tokens=1, extra_body={"add_special_tokens": False})
        assert server.engine.requests[-1].prompt_token_ids == encode("hi")

    def test_several_prompts_return_n_choices_each(self, client: openai.OpenAI, server: LiveServer) -> None:
        completion = client.completions.create(model="tiny", prompt=["a", "b", "c"], n=2, max_tokens=3, seed=5)
        assert [choice.index for choice in completion.choices] == list(range(6))
        assert {request.sampling.seed for request in server.engine.requests[-3:]} == {5}
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 18

    def test_logprobs(self, client: openai.OpenAI) -> None:
        completion = client.completions.create(model="tiny", prompt="hi", max_tokens=3, logprobs=2)
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == [TOKENIZER.decode([token_id]) for token_id in encode(TEXT)[:3]]
        assert logprobs.token_logprobs == [-0.5] * 3
        assert logprobs.text_offset is not None
        assert logprobs.text_offset[0] == 0
        assert logprobs.top_logprobs is not None
        assert len(logprobs.top_logprobs[0]) == 2

    def test_echo_puts_the_prompt_before_text_and_logprobs(self, client: openai.OpenAI) -> None:
        choice = client.completions.create(model="tiny", prompt="so: ", max_tokens=2, echo=True, logprobs=0).choices[0]
        assert choice.text == "so: " + TOKENIZER.decode(encode(TEXT)[:2])
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert "".join(logprobs.tokens[1:]) == choice.text
        assert logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None
        assert logprobs.text_offset is not None
        for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[1:]:
            assert choice.text[offset:].startswith(token)

    def test_echo_with_zero_max_tokens_generates_nothing(self, client: openai.OpenAI) -> None:
        completion = client.completions.create(model="tiny", prompt="so: ", max_tokens=0, echo=True, logprobs=1)
        choice = completion.choices[0]
        assert (choice.text, choice.finish_reason) == ("so: ", "length")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == "<|bos|>so: "
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 0

    @pytest.mark.parametrize(
        "fields",
        [{}, {"truncate_prompt_tokens": 3}, {"skip_special_tokens": False, "truncate_prompt_tokens": -1}],
        ids=str,
    )
    @pytest.mark.parametrize("are_texts", [True, False])
    def test_many_prompts_are_processed_off_the_event_loop_and_answered_as_if_sent_alone(
        self, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, fields: Any, are_texts: bool
    ) -> None:
        prompts: list[Any] = [f"{index} naïve 🙂 " * (1 + index % 16) for index in range(64)]
        if not are_texts:
            prompts = [TOKENIZER.encode(prompt).ids for prompt in prompts]
        asked = {"model": "tiny", "max_tokens": 1, "echo": True, "logprobs": 0, **fields}
        some = prompts[::5]  # of all lengths
        alone = [http.post("/v1/completions", json={**asked, "prompt": prompt}).json() for prompt in some]
        on_loop: list[bool] = []
        for owner, name in (TextTokenizer, "_encode"), (TextTokenizer, "_decode"), (completions, "_text_offsets"):
            monkeypatch.setattr(owner, name, noting(getattr(owner, name), on_loop))
        together = http.post("/v1/completions", json={**asked, "prompt": prompts}).raise_for_status().json()
        assert [choice["index"] for choice in together["choices"]] == [*range(len(prompts))]
        choices = [choice | {"index": 0} for choice in together["choices"][::5]]
        assert choices == [answered["choices"][0] for answered in alone]
        assert set(on_loop) == {False}

    def test_token_ids_and_prompt_logprobs_are_returned(self, http: httpx.Client) -> None:
        body = {
            "model": "tiny",
            "prompt": [5, 6],
            "max_tokens": 2,
            "return_token_ids": True,
            "prompt_logprobs": 1,
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
        }
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["token_ids"] == encode(TEXT)[:2]
        assert choice["prompt_token_ids"] == [5, 6]
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1]["6"] == {"logprob": -0.5, "rank": 1, "decoded_token": TOKENIZER.decode([6])}
        assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in encode(TEXT)[:2]]

    def test_a_stop_string_can_span_several_tokens(self, client: openai.OpenAI) -> None:
        completion = client.completions.create(model="tiny", prompt="hi", max_tokens=100, stop=["STOP", "zzz"])
        choice = completion.choices[0]
        assert choice.text == "hello world 🙂 "
        assert (choice.finish_reason, choice.to_dict()["stop_reason"]) == ("stop", "STOP")
        assert completion.usage is not None
        assert completion.usage.completion_tokens < len(encode(TEXT))

    def test_a_stop_token_is_left_out_and_a_stop_string_can_be_included(self, http: httpx.Client) -> None:
        token_id = encode(TEXT)[3]
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 100, "stop_token_ids": [token_id]}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token_id)
        assert choice["text"] == TOKENIZER.decode(encode(TEXT)[:3])
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 100, "stop": "STOP", "include_stop_str_in_output": True}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"].endswith(" STOP")

    def test_extra_sampling_fields_reach_the_engine(self, client: openai.OpenAI, server: LiveServer) -> None:
        extras = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "min_tokens": 3}
        client.completions.create(
            model="sql",
            prompt="hi",
            max_tokens=4,
            logit_bias={"5": -1},
            presence_penalty=0.5,
            extra_body={**extras, "cache_salt": "mine", "allowed_token_ids": [9, 8]},
        )
        request = server.engine.requests[-1]
        sampling = request.sampling
        assert {name: getattr(sampling, name) for name in extras} == extras
        assert (sampling.logit_bias, sampling.allowed_token_ids) == ({5: -1.0}, (8, 9))
        assert sampling.presence_penalty == 0.5
        assert request.cache_salt == salted(tenant_of(server.control, "default").doc.kv_salt, "mine")
        assert request.tenant == "default"
        assert request.adapter_digest == digest_of("sql")

    def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(self, http: httpx.Client, server: LiveServer) -> None:
        body = {"model": "tiny", "prompt": list(range(5, 25)), "max_tokens": 1, "truncate_prompt_tokens": 3}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert server.engine.requests[-1].prompt_token_ids == [22, 23, 24]

    @pytest.mark.parametrize(("max_tokens", "kept"), [(None, 511), (100, 412)])
    def test_a_too_long_prompt_is_truncated_to_leave_room_for_its_answer(
        self, http: httpx.Client, server: LiveServer, max_tokens: int | None, kept: int
    ) -> None:
        asked = {"model": "tiny", "max_tokens": max_tokens, "truncate_prompt_tokens": -1}
        answer = http.post("/v1/completions", json=asked | {"prompt": [*range(5, 255)] * 4})
        assert answer.status_code == 200, answer.text
        assert len(server.engine.requests[-1].prompt_token_ids) == kept
        messages = [{"role": "user", "content": TEXT * 40}]
        answer = http.post("/v1/chat/completions", json=asked | {"messages": messages})
        assert answer.status_code == 200, answer.text
        assert len(server.engine.requests[-1].prompt_token_ids) == kept


class TestChat:
    def test_response_shape(self, client: openai.OpenAI, server: LiveServer) -> None:
        chat = client.chat.completions.create(
            model="shout", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        )
        assert chat.id.startswith("chatcmpl-")
        assert (chat.object, chat.model) == ("chat.completion", "shout")
        message = chat.choices[0].message
        assert (message.role, message.content, message.refusal) == ("assistant", TEXT, None)
        assert chat.choices[0].finish_reason == "stop"
        request = server.engine.requests[-1]
        assert TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False) == (
            "<|bos|><|user|>hi<|end|>\n<|assistant|>"
        )
        assert request.sampling.max_tokens == 512 - len(request.prompt_token_ids)

    def test_an_answer_can_be_sent_back(self, client: openai.OpenAI) -> None:
        first = client.chat.completions.create(model="tiny", messages=USER)  # pyright: ignore[reportArgumentType]
        again = [*USER, first.choices[0].message.to_dict(), *USER]
        assert client.chat.completions.create(model="tiny", messages=again).choices  # pyright: ignore[reportArgumentType]

    def test_logprobs(self, client: openai.OpenAI) -> None:
        chat = client.chat.completions.create(
            model="tiny",
            messages=USER,  # pyright: ignore[reportArgumentType]
            max_completion_tokens=12,
            logprobs=True,
            top_logprobs=2,
        )
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == 12
        joined = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
        assert joined.decode(errors="replace") == chat.choices[0].message.content
        assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)

    def test_a_chat_can_continue_the_final_message(self, http: httpx.Client, server: LiveServer) -> None:
        body = {
            "model": "tiny",
            "messages": [*USER, {"role": "assistant", "content": "Well,"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        }
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        prompt = TOKENIZER.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
        assert prompt.endswith("<|assistant|>Well,")

    def test_an_adapters_base_url_serves_only_that_adapter(self, server: LiveServer) -> None:
        url = f"{server.url}/adapters/sql/v1"
        for model, status in ((None, 200), ("sql", 200), ("tiny:sql", 200), ("shout", 400), ("tiny", 400), ("no", 404)):
            body = {"messages": USER, "max_tokens": 2} | ({} if model is None else {"model": model})
            response = httpx.post(f"{url}/chat/completions", json=body)
            assert response.status_code == status, model
            if status == 200:
                assert response.json()["model"] == (model or "sql")
        assert httpx.post(f"{url}/completions", json={"prompt": "x", "max_tokens": 2}).json()["model"] == "sql"
        missing = httpx.post(f"{server.url}/adapters/nope/v1/completions", json={"prompt": "x"})
        assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


class TestModelsDefaults:
    """The model's generation_config applies to fields that the request omits."""

    @pytest.fixture
    def creative(self, tmp_path: Path) -> Iterator[LiveServer]:
        model = make_model(TOKENIZER, default_sampling={"temperature": 0.6, "top_k": 20, "max_new_tokens": 5})
        with live_server(FakeEngine(model=model), make_settings(tmp_path)) as server:
            yield server

    @pytest.mark.parametrize(
        ("path", "prompt", "max_tokens"),
        [("/v1/chat/completions", {"messages": USER}, 5), ("/v1/completions", {"prompt": "x"}, 16)],
    )
    def test_defaults_fill_gaps_and_limit_no_request(
        self, creative: LiveServer, path: str, prompt: dict[str, Any], max_tokens: int
    ) -> None:
        for extra, expected in (
            ({}, (0.6, 20, max_tokens)),
            ({"temperature": 0, "top_k": -1, "max_tokens": 40}, (0, 0, 40)),
        ):
            response = httpx.post(creative.url + path, json={"model": "tiny", **prompt, **extra})
            sampling = creative.engine.requests[-1].sampling
            assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == expected
            assert response.json()["usage"]["completion_tokens"] == expected[2]


class TestStreams:
    def test_bytes_and_headers_of_a_chat_stream(self, http: httpx.Client) -> None:
        body = {"model": "sql", "messages": USER, "stream": True, "max_tokens": 100}
        response = http.post("/v1/chat/completions", json=body, headers={"x-request-id": "my-id"})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"] == "my-id"
        chunks = events(response.text)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "stop")
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
        for chunk in chunks:
            assert (chunk["id"], chunk["object"], chunk["model"]) == ("chatcmpl-my-id", "chat.completion.chunk", "sql")
            assert "usage" not in chunk

    def test_the_usage_chunk_is_sent_only_on_request(self, client: openai.OpenAI) -> None:
        stream = client.chat.completions.create(
            model="tiny",
            messages=USER,  # pyright: ignore[reportArgumentType]
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(encode(TEXT)) + 1

    def test_continuous_usage_is_in_every_chunk(self, http: httpx.Client) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"model": "tiny", "prompt": "hi", "stream": True, "max_tokens": 3, "stream_options": options}
        chunks = events(http.post("/v1/completions", json=body).text)
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]

    def test_streamed_choices_of_several_prompts_keep_their_index(self, client: openai.OpenAI) -> None:
        stream = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=100, stream=True)
        texts: dict[int, str] = {}
        reasons: dict[int, str | None] = {}
        for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            assert reasons.get(choice.index) is None
            reasons[choice.index] = choice.finish_reason
        assert texts == dict.fromkeys(range(4), TEXT)
        assert reasons == dict.fromkeys(range(4), "stop")

    def test_every_choice_of_a_chat_stream_starts_with_its_role(self, http: httpx.Client) -> None:
        body = {"model": "tiny", "messages": USER, "stream": True, "max_tokens": 2, "n": 3}
        chunks = events(http.post("/v1/chat/completions", json=body).text)
        assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
        assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in chunks[:3])

    def test_echo_streams_the_prompt_once(self, http: httpx.Client) -> None:
        body = {"model": "tiny", "prompt": "so: ", "stream": True, "max_tokens": 3, "echo": True, "logprobs": 0}
        choices = [chunk["choices"][0] for chunk in events(http.post("/v1/completions", json=body).text)]
        assert "".join(choice["text"] for choice in choices) == "so: " + TOKENIZER.decode(encode(TEXT)[:3])
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        assert "".join(tokens[1:]) == "so: " + TOKENIZER.decode(encode(TEXT)[:3])


OPTIONS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 60), "n": st.integers(1, 3)},
    optional={
        "stop": st.lists(
            st.sampled_from(["STOP", " h", "🙂", "naïve", "o w", "京"]), min_size=1, max_size=2, unique=True
        ),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.just(1),
        "logprobs": st.integers(0, 2),
        "echo": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=OPTIONS, tokens_per_step=st.integers(1, 4), prompts=st.sampled_from(["a", ["a", "bc"]]))
def test_a_joined_stream_equals_the_response(
    http: httpx.Client, server: LiveServer, options: dict[str, Any], tokens_per_step: int, prompts: object
) -> None:
    body = {"model": "sql", "prompt": prompts, "seed": 1, "return_token_ids": True, **options}
    whole = http.post("/v1/completions", json=body).json()
    server.engine.tokens_per_step = tokens_per_step
    try:
        streamed = http.post(
            "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
        ).text
    finally:
        server.engine.tokens_per_step = 1
    *chunks, last = events(streamed)
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        assert own[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"]:
            for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
                assert [entry for part in own for entry in part["logprobs"][name]] == choice["logprobs"][name]


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("functions", [{}]),
            ("function_call", {"name": "f"}),
            ("modalities", ["text", "audio"]),
            ("audio", {"voice": "x"}),
            ("reasoning_effort", "high"),
            ("include_reasoning", False),
            ("web_search_options", {}),
            ("guided_decoding_backend", "xgrammar"),
            ("use_beam_search", True),
            ("best_of", 3),
            ("chat_template", "{{ 1 }}"),
            ("echo", True),
            ("documents", [{}]),
            ("spaces_between_special_tokens", False),
            ("store", True),
            ("thinking_token_budget", 9),
        ],
    )
    def test_unsupported_fields_are_named(self, http: httpx.Client, field: str, value: object) -> None:
        response = http.post("/v1/chat/completions", json={"model": "tiny", "messages": USER, field: value})
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", field)
        assert field in error["message"]

    def test_neutral_values_and_harmless_fields_are_accepted(self, http: httpx.Client) -> None:
        neutral = {
            "tools": [],
            "tool_choice": "none",
            "functions": None,
            "parallel_tool_calls": None,
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "best_of": 1,
            "use_beam_search": False,
            "length_penalty": 1.0,
            "guided_decoding_backend": "guidance",
            "spaces_between_special_tokens": True,
            "chat_template": None,
            "chat_template_kwargs": {},
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "prompt_cache_key": "k",
            "user": "u",
            "safety_identifier": "s",
            "priority": 0,
            "seed": None,
            "stop": None,
            "logit_bias": None,
            "stream_options": None,
        }
        body = {"model": "tiny", "messages": USER, "max_tokens": 2, **neutral}
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text

    @pytest.mark.parametrize(
        ("path", "extra", "param"),
        [
            ("/v1/completions", {"prompt": "x", "surprise": 1}, "surprise"),
            (
                "/v1/completions",
                {"prompt": "x", "stream": True, "stream_options": {"surprise": 1}},
                "stream_options.surprise",
            ),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "surprise": 1}]}, None),
            ("/tokenize", {"prompt": "x", "surprise": 1}, "surprise"),
            ("/detokenize", {"tokens": [1], "surprise": 1}, "surprise"),
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y", "surprise": 1}, "surprise"),
        ],
    )
    def test_unknown_fields_are_named(
        self, http: httpx.Client, path: str, extra: dict[str, Any], param: str | None
    ) -> None:
        body = extra if path == "/v1/load_lora_adapter" else {"model": "tiny", **extra}
        response = http.post(path, json=body)
        error = error_of(response)
        assert (response.status_code, error["code"]) == (400, "unknown_parameter")
        assert "surprise" in error["message"]
        if param is not None:
            assert error["param"] == param

    @pytest.mark.parametrize(
        ("extra", "quoted"),
        [
            ({"s" * 100_000: 1}, "s" * 64),
            ({"`" * 100_000: 1}, "`" * 64),
            ({"stream_options": {"s" * 100_000: 1}}, "stream_options." + "s" * 49),
            ({"response_format": {"type": "s" * 100_000}}, "s" * 32),
        ],
    )
    def test_a_refusal_quotes_only_the_beginning_of_the_sent_text(
        self, http: httpx.Client, extra: dict[str, Any], quoted: str
    ) -> None:
        response = http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True, **extra})
        assert response.status_code == 400
        assert quoted in error_of(response)["message"]
        assert len(response.content) < 1000

    @pytest.mark.parametrize(
        ("extra", "code", "param"),
        [
            ({"n": "3"}, "invalid_type", "n"),
            ({"n": 2.0}, "invalid_type", "n"),
            ({"stream": 1}, "invalid_type", "stream"),
            ({"stream": "true"}, "invalid_type", "stream"),
            ({"temperature": "hot"}, "invalid_type", "temperature"),
            ({"temperature": 3}, "invalid_value", "temperature"),
            ({"n": 9}, "invalid_value", "n"),
            ({"max_tokens": 0}, "invalid_value", "max_tokens"),
            ({"max_tokens": -1}, "invalid_value", "max_tokens"),
            ({"max_tokens": 10**6}, "context_length_exceeded", "max_tokens"),
            ({"logprobs": 21}, "invalid_value", "logprobs"),
            ({"logit_bias": {"100000": 1}}, "invalid_value", "logit_bias"),
            ({"stop_token_ids": [2**40]}, "invalid_value", "stop_token_ids"),
            ({"prompt": [5, 10**6]}, "invalid_value", "prompt"),
            ({"prompt": []}, "invalid_value", "prompt"),
            ({"prompt": "", "add_special_tokens": False}, "invalid_value", "prompt"),
            ({"prompt": ["x"] * 65}, "invalid_value", "prompt"),
            ({"prompt": [[5] * 400] * 64, "n": 8, "echo": True, "logprobs": 20}, "invalid_value", "logprobs"),
            ({"prompt": [[5] * 400] * 64, "n": 8, "prompt_logprobs": 20}, "invalid_value", "prompt_logprobs"),
            ({"prompt": {"a": 1}}, "invalid_type", "prompt"),
            ({"prompt": [5] * 600}, "context_length_exceeded", "prompt"),
            ({"model": None}, "missing_required_parameter", "model"),
            ({"model": ""}, "missing_required_parameter", "model"),
            ({"suffix": "x"}, "unsupported_parameter", "suffix"),
            ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ],
    )
    def test_invalid_values_are_refused_naming_the_field(
        self, http: httpx.Client, server: LiveServer, extra: Any, code: str, param: str
    ) -> None:
        before = len(server.engine.requests)
        response = http.post("/v1/completions", json={"model": "tiny", "prompt": "x", **extra})
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (400, code, param)
        assert error["type"] == "invalid_request_error"
        assert len(server.engine.requests) == before

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"max_completion_tokens": 0}, "max_completion_tokens"),
            ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 10**6}, "max_tokens"),
            ({"messages": [{"role": "user", "content": "x " * 600}]}, "messages"),
        ],
    )
    def test_errors_about_a_chats_limit_name_the_field_that_was_sent(
        self, http: httpx.Client, fields: Any, param: str
    ) -> None:
        response = http.post("/v1/chat/completions", json={"model": "tiny", "messages": USER, **fields})
        assert (response.status_code, error_of(response)["param"]) == (400, param)

    def test_prompt_logprobs_of_a_chat_are_limited(self, tmp_path: Path) -> None:
        served = make_settings(tmp_path, limits=RequestLimits(max_prompt_logprobs=20))
        asked: Any = {"model": "tiny", "messages": USER, "prompt_logprobs": 1}
        with live_server(says(TEXT), served) as server:
            url = f"{server.url}/v1/chat/completions"
            assert httpx.post(url, json=asked).status_code == 200
            long = httpx.post(url, json=asked | {"messages": [{"role": "user", "content": "x" * 10}]})
        assert (long.status_code, error_of(long)["param"]) == (400, "prompt_logprobs")

    @pytest.mark.parametrize("model", ["nope", "tiny:nope", "nope:sql", "org/nope", ":", "tiny:", "SQL"])
    def test_an_unknown_model_never_falls_back_to_the_base(
        self, http: httpx.Client, server: LiveServer, model: str
    ) -> None:
        before = len(server.engine.requests)
        response = http.post("/v1/completions", json={"model": model, "prompt": "x"})
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert len(server.engine.requests) == before

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b"\xff",
            b'{"metadata":' + b"[" * 100_000,
            b'{"prompt":"\\ud800x"}',
            b'{"model":"tiny","prompt":"x","metadata":{"x":"\xff"}}',
        ],
    )
    def test_bodies_that_are_not_valid_json_objects_are_refused(self, http: httpx.Client, body: bytes) -> None:
        response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert error_of(response)["type"] == "invalid_request_error"

    @pytest.mark.parametrize("depth", [32, 33])
    def test_a_too_deeply_nested_body_is_refused(self, http: httpx.Client, depth: int) -> None:
        metadata = "[" * (depth - 1) + "]" * (depth - 1)
        body = f'{{"model":"tiny","prompt":"[[[[","metadata":{metadata},"max_tokens":1}}'
        response = http.post("/v1/completions", content=body)
        assert response.status_code == (200 if depth == 32 else 400)
        if depth == 33:
            error = error_of(response)
            assert error["code"] == "invalid_json"
            assert "33 levels deep; the limit is 32" in error["message"]

    @pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing"])
    def test_a_too_large_head_is_refused(self, http: httpx.Client, path: str) -> None:
        assert http.get(path, headers={"x-much": "x" * 31_000}).status_code != 431
        many = [("x-many", "x" * 100)] * 320
        for response in (
            http.get(path, headers={"x-much": "x" * 33_000}),
            http.get(path, headers=many),
            http.get(path, params={"x": "x" * 33_000}),
        ):
            assert (response.status_code, error_of(response)["code"]) == (431, "headers_too_large")

    def test_a_too_large_body_is_refused(self, http: httpx.Client) -> None:
        response = http.post("/v1/completions", content=b'{"prompt":"' + b"x" * 2_000_001)
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")

    def test_unknown_routes_and_wrong_methods_are_refused(self, http: httpx.Client) -> None:
        missing = http.get("/v1/nothing")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
        wrong = http.delete("/v1/completions")
        assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
        listed = http.options("/v1/completions")
        assert (listed.status_code, listed.content) == (204, b"")
        for answer in (wrong, listed):
            assert {*answer.headers["allow"].split(", ")} == {"POST", "OPTIONS"}

    @pytest.mark.parametrize("path", ["/v1/adapters", "/v1/adapters/some/aliases/live", "/ui/some/file.js"])
    def test_options_names_the_methods_of_all_handlers_of_a_path(self, http: httpx.Client, path: str) -> None:
        listed, refused = http.options(path), http.request("TRACE", path)
        assert (listed.status_code, refused.status_code) == (204, 405)
        assert {*listed.headers["allow"].split(", ")} == {*refused.headers["allow"].split(", ")}

    def test_a_malformed_host_is_refused(self, http: httpx.Client) -> None:
        response = http.get("/v1/models", headers={"host": "evil.example/localhost"})
        assert response.status_code == 400
        assert error_of(response)

    def test_harmful_request_ids_are_replaced(self, http: httpx.Client) -> None:
        for given_id in ("a b", "x" * 129, "ü"):
            response = http.get("/health", headers={"x-request-id": given_id.encode()})
            assert len(response.headers["x-request-id"]) == 32


class TestText:
    def test_detokenize_reverses_tokenize(self, http: httpx.Client) -> None:
        tokens = http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
        assert tokens["tokens"] == [0, *encode(TEXT)]
        assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 512)
        assert tokens["token_strs"][0] == "<|bos|>"
        back = http.post("/detokenize", json={"model": "tiny", "tokens": tokens["tokens"]}).json()
        assert back == {"prompt": f"<|bos|>{TEXT}"}
        assert "token_strs" not in http.post("/tokenize", json={"prompt": "x"}).json()

    def test_tokenize_renders_messages(self, http: httpx.Client) -> None:
        tokens = http.post("/tokenize", json={"model": "sql", "messages": USER}).json()["tokens"]
        assert TOKENIZER.decode(tokens, skip_special_tokens=False) == "<|bos|><|user|>hi<|end|>\n<|assistant|>"

    @pytest.mark.parametrize(
        ("path", "body", "status"),
        [
            ("/tokenize", {}, 400),
            ("/tokenize", {"prompt": "x", "messages": USER}, 400),
            ("/tokenize", {"model": "nope", "prompt": "x"}, 404),
            ("/tokenize", {"messages": USER, "continue_final_message": True}, 400),
            ("/detokenize", {"tokens": [10**6]}, 400),
            ("/detokenize", {"tokens": ["x"]}, 400),
            ("/detokenize", {}, 400),
        ],
    )
    def test_invalid_requests_are_refused(self, http: httpx.Client, path: str, body: object, status: int) -> None:
        assert http.post(path, json=body).status_code == status


class TestDisconnects:
    @pytest.fixture
    def endless(self, tmp_path: Path) -> Iterator[LiveServer]:
        engine = FakeEngine(model=make_model(TOKENIZER, max_model_len=10**6), step_s=0.002)
        engine.reply = lambda request, index: [50] * 20_000
        with live_server(engine, make_settings(tmp_path)) as server:
            yield server

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("prompts", ["x", ["x", "y", "z"]])
    def test_a_client_that_disconnects_aborts_its_requests(
        self, endless: LiveServer, stream: bool, prompts: object
    ) -> None:
        body = {"model": "tiny", "prompt": prompts, "max_tokens": 10**5, "stream": stream, "n": 2}
        with open_request(endless, body) as connection:
            endless.wait_until(lambda: endless.engine.stats.step > 3)
            if stream:
                assert connection.recv(1000)
        count = len(prompts)  # pyright: ignore[reportArgumentType]
        endless.wait_until(lambda: not endless.engine.running)
        assert len(endless.engine.aborted) == count
        endless.wait_until(lambda: endless.runtime.lifecycle.num_sequences == 0)
        if not stream:
            gone = b'loraserve_errors_total{code="client_closed_request"} 1.0'
            endless.wait_until(lambda: gone in endless.runtime.metrics.render())

    def test_a_disconnect_during_the_body_is_not_an_internal_error(self, endless: LiveServer) -> None:
        for path in ("/v1/completions", "/v1/keys"):
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: x\r\nContent-Length: 99\r\n\r\n"
            with socket.create_connection(("127.0.0.1", httpx.URL(endless.url).port)) as connection:
                connection.sendall(head.encode() + b'{"model": ')
        gone = b'loraserve_errors_total{code="client_closed_request"} 2.0'
        endless.wait_until(lambda: gone in endless.runtime.metrics.render())
        assert b'code="internal_error"' not in endless.runtime.metrics.render()

    def test_a_disconnect_before_the_first_token_aborts_the_request(self, endless: LiveServer) -> None:
        endless.engine.step_s = 3600
        for stream in (True, False):
            body = {"model": "tiny", "prompt": "x", "max_tokens": 9, "stream": stream}
            with open_request(endless, body):
                endless.wait_until(lambda: bool(endless.engine.running))
            endless.wait_until(lambda: not endless.engine.running)
            assert endless.runtime.lifecycle.num_sequences == 0

    def test_a_client_that_does_not_read_stalls_only_its_own_stream(self, endless: LiveServer) -> None:
        endless.engine.step_s = 0
        body = {"model": "tiny", "prompt": "x", "max_tokens": 20_000, "stream": True, "logprobs": 20}
        with open_request(endless, body, receive_bytes=4096):
            steps: list[int] = []

            def stalled() -> bool:
                steps.append(endless.engine.stats.step)
                return len(steps) > 100 and steps[-1] == steps[-100] > 0

            endless.wait_until(stalled)
            assert endless.engine.running
            other = httpx.post(f"{endless.url}/tokenize", json={"prompt": "x"})
            assert other.status_code == 200
        endless.wait_until(lambda: not endless.engine.running)
        assert endless.runtime.lifecycle.num_sequences == 0

    def test_a_stop_string_aborts_the_request_in_the_engine(self, endless: LiveServer) -> None:
        text = TOKENIZER.decode([50])
        body = {"model": "tiny", "prompt": "x", "max_tokens": 10**5, "stop": text * 3}
        assert httpx.post(f"{endless.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        endless.wait_until(lambda: not endless.engine.running)
        assert len(endless.engine.aborted) == 1


def open_request(server: LiveServer, body: object, receive_bytes: int | None = None) -> socket.socket:
    """A raw connection with a completion request sent on it."""
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", httpx.URL(server.url).port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


class TestFailures:
    def test_an_error_before_the_first_token_keeps_its_status(self, tmp_path: Path) -> None:
        engine = says(TEXT)
        engine.error = "the engine ended with signal 9"
        with live_server(engine, make_settings(tmp_path)) as server:
            for stream in (True, False):
                response = httpx.post(
                    f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x", "stream": stream}
                )
                assert (response.status_code, error_of(response)["code"]) == (503, "engine_dead")
                assert "signal" not in response.text
            assert httpx.get(f"{server.url}/health").status_code == 503
            assert httpx.get(f"{server.url}/health/ready").status_code == 503
            assert httpx.get(f"{server.url}/health/live").status_code == 200
            assert httpx.get(f"{server.url}/v1/models").status_code == 200

    def test_an_error_during_a_stream_is_sent_in_the_stream(self, tmp_path: Path) -> None:
        engine = says(TEXT)
        engine.fail_with = "the logits are not finite"
        with live_server(engine, make_settings(tmp_path)) as server:
            body = {"model": "tiny", "prompt": "x", "stream": True}
            text = httpx.post(f"{server.url}/v1/completions", json=body).text
            last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
            assert (last["error"]["code"], last["error"]["message"]) == ("engine_error", "the logits are not finite")
            assert "[DONE]" not in text
            with (
                openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
                pytest.raises(openai.APIError, match="not finite"),
            ):
                list(client.completions.create(model="tiny", prompt="x", stream=True))
            whole = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x"})
            assert (whole.status_code, error_of(whole)["code"]) == (500, "engine_error")

    @pytest.mark.parametrize(
        ("engine_code", "status", "code"),
        [
            (EngineErrorCode.INVALID_REQUEST, 400, "invalid_request"),
            (EngineErrorCode.ADAPTER_NOT_LOADED, 404, "model_not_found"),
            (EngineErrorCode.ADAPTER_UNREADABLE, 500, "adapter_unreadable"),
            (EngineErrorCode.NOT_FINITE, 500, "not_finite"),
        ],
    )
    def test_the_engines_code_decides_the_status(
        self, tmp_path: Path, engine_code: EngineErrorCode, status: int, code: str
    ) -> None:
        engine = says(TEXT)
        engine.fail_with, engine.fail_code = "/packed/dddd cannot be read", engine_code
        with live_server(engine, make_settings(tmp_path), ("sql",)) as server:
            response = httpx.post(f"{server.url}/v1/completions", json={"model": "sql", "prompt": "x"})
            error = error_of(response)
            assert (response.status_code, error["code"]) == (status, code)
            if code in ("model_not_found", "adapter_unreadable"):
                assert "'sql'" in error["message"]
                assert "/packed" not in error["message"]

    def test_unexpected_errors_are_reported_without_details(self, tmp_path: Path) -> None:
        engine = says(TEXT)

        def broken(request: EngineRequest, index: int) -> list[int]:
            raise RuntimeError("secret path /root/x")

        engine.reply = broken
        with live_server(engine, make_settings(tmp_path)) as server:
            for stream in (True, False):
                response = httpx.post(
                    f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x", "stream": stream}
                )
                assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
                assert "secret" not in response.text
            server.wait_until(lambda: server.runtime.lifecycle.num_sequences == 0)

    def test_a_full_queue_refuses_requests_with_429(self, tmp_path: Path) -> None:
        engine = says(TEXT)
        with live_server(engine, make_settings(tmp_path, limits=RequestLimits(max_queued=5))) as server:
            engine.stats = EngineStats(num_waiting=5)
            response = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x"})
            assert (response.status_code, error_of(response)["type"]) == (429, "rate_limit_error")
            assert int(response.headers["retry-after"]) >= 1

    def test_draining_refuses_new_requests_and_finishes_running_ones(self, tmp_path: Path) -> None:
        engine = says(TEXT)
        engine.step_s = 0.01
        with live_server(engine, make_settings(tmp_path)) as server:
            url = f"{server.url}/v1/completions"
            body = {"model": "tiny", "prompt": "x", "max_tokens": 100, "stream": True}
            with httpx.stream("POST", url, json=body) as response:
                lines = response.iter_lines()
                next(lines)
                server.call(server.runtime.lifecycle.begin_drain)
                refused = httpx.post(url, json=body)
                assert (refused.status_code, error_of(refused)["code"]) == (503, "server_draining")
                assert refused.headers["retry-after"]
                assert httpx.get(f"{server.url}/health/ready").status_code == 503
                assert httpx.get(f"{server.url}/health").status_code == 200
                rest = list(lines)
            assert "data: [DONE]" in rest
            assert server.run(server.runtime.lifecycle.wait_idle(30))

    def test_ready_needs_progress_when_there_is_work(self, tmp_path: Path) -> None:
        engine = says(TEXT)
        with live_server(engine, make_settings(tmp_path, progress_timeout_s=0.05)) as server:
            engine.last_progress_s -= 60
            assert httpx.get(f"{server.url}/health/ready").status_code == 200
            engine.stats = EngineStats(num_waiting=1)
            assert httpx.get(f"{server.url}/health/ready").status_code == 503
            assert httpx.get(f"{server.url}/health").content == b""

    def test_headers_and_pings_are_sent_while_the_engine_is_busy(self, tmp_path: Path) -> None:
        engine = says(TEXT)
        engine.step_s = 3600
        served = make_settings(tmp_path, first_output_wait_s=0.02, ping_interval_s=0.02)
        with live_server(engine, served) as server:
            body = {"model": "tiny", "prompt": "x", "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                assert response.status_code == 200
                lines = response.iter_lines()
                assert [next(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
            server.wait_until(lambda: not engine.running)


class TestTiming:
    def test_an_answer_reports_its_timing_in_headers_and_metrics(self, tmp_path: Path) -> None:
        engine = says(TEXT)
        engine.step_s, engine.num_cached_tokens = 0.002, 3
        with live_server(engine, make_settings(tmp_path), ("sql",)) as server:
            body = {"model": "sql", "prompt": "x", "max_tokens": 4, "include_metrics": True}
            whole = httpx.post(f"{server.url}/v1/completions", json=body)
            streamed = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": True})
            for response in (whole, streamed):
                headers = response.headers
                assert (headers["x-adapter-version"], headers["x-cached-tokens"]) == ("1", "3")
                assert float(headers["x-queue-ms"]) == 1.0
                assert float(headers["x-ttft-ms"]) > 0
                assert float(headers["x-adapter-load-ms"]) >= 0
            events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
            assert events[-1] == "[DONE]"
            last = json.loads(events[-2])
            assert last["choices"] == []
            for metrics in (whole.json()["metrics"], last["metrics"]):
                assert (metrics["cached_tokens"], metrics["adapter_version"], metrics["queue_time_ms"]) == (3, 1, 1.0)
                assert metrics["generation_time_ms"] > metrics["mean_itl_ms"] > 0
            silent = httpx.post(f"{server.url}/v1/completions", json={**body, "include_metrics": False})
            assert "metrics" not in silent.json()

    def test_a_stream_opened_before_its_first_token_has_no_ttft_header(self, tmp_path: Path) -> None:
        engine = says(TEXT)
        engine.gate = asyncio.Event()
        with live_server(engine, make_settings(tmp_path, first_output_wait_s=0.01), ("sql",)) as server:
            body = {"model": "sql", "prompt": "x", "stream": True, "include_metrics": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                assert "x-ttft-ms" not in response.headers
                assert response.headers["x-adapter-version"] == "1"
                server.call(engine.gate.set)
                text = response.read().decode()
            assert json.loads(text.split("\n\n")[-3].removeprefix("data: "))["metrics"]["time_to_first_token_ms"] > 0


class TestAuth:
    KEY = "ls-1_secret"
    VALUES: ClassVar[dict[str, str]] = {"adapter": "sql", "model_id": "tiny", "name": "sql", "version": "1"}
    OF_LORAX = ("/", "/generate", "/generate_stream")

    @pytest.fixture
    def locked(self, tmp_path: Path) -> Iterator[LiveServer]:
        with live_server(says(TEXT), make_settings(tmp_path), ("sql",), flag_keys=("other", self.KEY)) as server:
            yield server

    def test_every_route_requires_a_key_except_the_public_ones(self, locked: LiveServer) -> None:
        key = {"authorization": f"Bearer {self.KEY}"}
        paths = httpx.get(f"{locked.url}/schema/openapi.json", headers=key).json()["paths"]
        public = {"/health", "/health/live", "/health/ready", "/ping", "/version"}
        assert public < paths.keys()
        assert paths["/v1/session"].pop("post"), "logging in needs no key yet"
        for path, operations in [*paths.items(), ("/schema/openapi.json", {"get": {}})]:
            url = locked.url + re.sub(r"\{(\w+)\}", lambda found: self.VALUES.get(found[1], "x"), path)
            for method in operations:
                for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {self.KEY}"}):
                    response = httpx.request(method, url, headers=headers)
                    if path in public:
                        assert response.status_code == 200
                        continue
                    assert response.status_code == 401, path
                    assert response.headers["www-authenticate"] == "Bearer"
                    if path in self.OF_LORAX:
                        assert response.json()["error_type"] == "authentication_error"
                    elif "/v1/messages" in path:
                        error = response.json()
                        assert (error["type"], error["error"]["type"]) == ("error", "authentication_error"), path
                    else:
                        error = error_of(response)
                        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error"), path
                assert httpx.request(method, url, headers=key).status_code != 401

    def test_a_command_line_key_can_only_infer(self, locked: LiveServer) -> None:
        with httpx.Client(base_url=locked.url, headers={"x-api-key": self.KEY}) as client:
            assert client.post("/v1/completions", json={"model": "sql", "prompt": "x"}).status_code == 200
            assert client.get("/v1/models").status_code == 200
            for path in ("/v1/adapters", "/v1/keys", "/v1/tenants", "/metrics"):
                response = client.get(path)
                assert (response.status_code, error_of(response)["code"]) == (403, "forbidden"), path
            other_tenant = client.get("/v1/models", headers={"x-tenant": "shared"})
            assert (other_tenant.status_code, error_of(other_tenant)["code"]) == (403, "forbidden")

    def test_two_different_keys_in_one_request_are_refused(self, locked: LiveServer) -> None:
        asked = {"model": "sql", "prompt": "x", "max_tokens": 1}
        for bearer, own, status in (
            (f"Bearer {self.KEY}", "other", 401),
            (f"Bearer {self.KEY}", "wrong", 401),
            ("Bearer wrong", self.KEY, 401),
            (f"Bearer {self.KEY}", self.KEY, 200),
            ("Bearer", self.KEY, 200),
            ("Basic eDp5", self.KEY, 200),
        ):
            headers = {"authorization": bearer, "x-api-key": own}
            response = httpx.post(f"{locked.url}/v1/completions", json=asked, headers=headers)
            assert response.status_code == status, headers
            assert self.KEY not in response.text

    def test_the_openai_client_needs_a_valid_key(self, locked: LiveServer) -> None:
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=self.KEY, max_retries=0) as client:
            assert client.completions.create(model="sql", prompt="x").choices
        with (
            openai.OpenAI(base_url=f"{locked.url}/v1", api_key="nope", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()

    def test_an_open_server_ignores_the_authorization_header(self, http: httpx.Client) -> None:
        basic = base64.b64encode(b"a:b").decode()
        for header in ("Bearer whatever", f"Basic {basic}", "nonsense"):
            assert http.get("/v1/models", headers={"authorization": header}).status_code == 200


class TestOpenMode:
    @pytest.fixture(scope="class")
    @classmethod
    def guarded(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
        served = make_settings(
            tmp_path_factory.mktemp("data"),
            allowed_hosts=["localhost", "127.0.0.1", "[::1]"],
            allowed_origins=["https://console.example"],
        )
        with live_server(says(TEXT), served) as server:
            yield server

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({}, 200),
            ({"host": "localhost:9"}, 200),
            ({"host": "LOCALHOST"}, 200),
            ({"host": "[::1]:8000"}, 200),
            ({"host": "[::1]"}, 200),
            ({"host": "evil.example"}, 403),
            ({"host": "localhost.evil.example"}, 403),
            ({"host": "evil.example:80"}, 403),
            ({"host": ""}, 403),
            ({"host": "localhost:9", "origin": "http://localhost:9"}, 200),
            ({"host": "localhost:9", "origin": "http://localhost:10"}, 403),
            ({"origin": "https://console.example"}, 200),
            ({"origin": "https://console.example", "sec-fetch-site": "cross-site"}, 200),
            ({"origin": "https://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"sec-fetch-site": "cross-site"}, 403),
            ({"sec-fetch-site": "same-origin"}, 200),
            ({"sec-fetch-site": "none"}, 200),
        ],
    )
    def test_hosts_and_origins_are_checked(self, guarded: LiveServer, headers: dict[str, str], status: int) -> None:
        for path in ("/health", "/v1/models", "/schema/openapi.json", "/nothing"):
            response = httpx.get(guarded.url + path, headers=headers)
            assert response.status_code == (404 if path == "/nothing" and status == 200 else status), path
            if status == 403:
                assert error_of(response)["code"] == "forbidden"

    def test_pages_of_an_allowed_origin_may_send_any_header(self, guarded: LiveServer) -> None:
        """As OpenAI's client for JavaScript does."""
        asked = "authorization,content-type,x-request-id,x-stainless-os,x-stainless-retry-count"
        headers = {"access-control-request-method": "POST", "access-control-request-headers": asked}
        url = f"{guarded.url}/v1/chat/completions"
        answer = httpx.options(url, headers={**headers, "origin": "https://console.example"})
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "https://console.example"
        assert answer.headers["access-control-allow-headers"] == asked.replace(",", ", ")
        refused = httpx.options(url, headers={**headers, "origin": "https://evil.example"})
        assert refused.status_code == 403
        assert "access-control-allow-headers" not in refused.headers

    def test_a_form_from_another_site_is_refused(self, guarded: LiveServer) -> None:
        files = {"files": ("adapter_config.json", b"{}")}
        for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
            response = httpx.post(f"{guarded.url}/v1/adapters", files=files, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (403, "forbidden")
        ours = httpx.post(f"{guarded.url}/v1/adapters", files=files, headers={"origin": guarded.url})
        assert (ours.status_code, error_of(ours)["param"]) == (400, "adapter_model.safetensors")

    def test_a_post_without_a_body_needs_no_content_type_but_an_allowed_origin(self, guarded: LiveServer) -> None:
        url = f"{guarded.url}/v1/adapters/nope/restore"
        assert httpx.post(url).status_code == 404
        assert httpx.post(url, headers={"origin": "https://evil.example"}).status_code == 403
        assert httpx.post(url, content=b"", headers={"content-type": "text/plain"}).status_code == 415

    def test_bodies_must_be_json(self, guarded: LiveServer) -> None:
        body = b'{"prompt":"x"}'
        for content_type, status in (
            ("application/json", 200),
            ("application/json; charset=utf-8", 200),
            ("text/plain", 415),
            ("application/x-www-form-urlencoded", 415),
            ("", 415),
        ):
            response = httpx.post(f"{guarded.url}/tokenize", content=body, headers={"content-type": content_type})
            assert response.status_code == status, content_type

    @pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/tokenize", "/v1/adapters"])
    def test_a_compressed_body_is_refused_naming_its_encoding(self, guarded: LiveServer, path: str) -> None:
        is_form = path == "/v1/adapters"
        headers = {
            "content-type": "multipart/form-data; boundary=x" if is_form else "application/json",
            "content-encoding": "gzip",
        }
        response = httpx.post(f"{guarded.url}{path}", content=gzip.compress(b'{"prompt":"x"}'), headers=headers)
        assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
        assert "Content-Encoding is 'gzip'" in response.text
        headers = {"content-type": "application/json", "content-encoding": "identity"}
        assert httpx.post(f"{guarded.url}/tokenize", content=b'{"prompt":"x"}', headers=headers).status_code == 200

    def test_nothing_is_checked_without_allowed_hosts(self, http: httpx.Client) -> None:
        headers = {"host": "anything", "origin": "http://elsewhere", "content-type": "text/plain"}
        assert http.post("/tokenize", content=b'{"prompt":"x"}', headers=headers).status_code == 200


class TestAdapterRoutes:
    def test_runtime_loading_can_be_switched_off(self, tmp_path: Path) -> None:
        with live_server(says(TEXT), make_settings(tmp_path, allow_runtime_lora=False), ("sql",)) as server:
            self._refused(server)

    def _refused(self, server: LiveServer) -> None:
        for path, body in (
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}),
            ("/v1/unload_lora_adapter", {"lora_name": "sql"}),
        ):
            response = httpx.post(server.url + path, json=body)
            assert (response.status_code, error_of(response)["code"]) == (403, "forbidden")
        assert httpx.get(f"{server.url}/v1/models/sql").status_code == 200

    def test_loading_from_a_path_without_adapter_roots_is_refused(self, tmp_path: Path) -> None:
        with live_server(says(TEXT), make_settings(tmp_path), ("sql",)) as server:
            sent = {"lora_name": "x", "lora_path": "/etc"}
            response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=sent)
            assert (response.status_code, error_of(response)["code"]) == (403, "forbidden")
            assert "--adapter-roots" in error_of(response)["message"]

    def test_paths_outside_the_roots_look_missing(self, tmp_path: Path) -> None:
        inside, outside = tmp_path / "roots", tmp_path / "elsewhere"
        inside.mkdir()
        outside.mkdir()
        (inside / "link").symlink_to(outside)
        served = make_settings(tmp_path, adapter_roots=[inside])
        with live_server(says(TEXT), served) as server:
            for path in (outside, inside / "link", inside / ".." / "elsewhere", tmp_path / "no"):
                sent = {"lora_name": "new", "lora_path": str(path)}
                response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=sent)
                assert (response.status_code, error_of(response)["code"]) == (404, "adapter_not_found")

    def test_links_out_of_the_roots_are_not_followed(self, tmp_path: Path) -> None:
        folder = self._linked(tmp_path)
        served = make_settings(tmp_path, adapter_roots=[folder])
        with live_server(says(TEXT), served) as server:
            sent = {"lora_name": "new", "lora_path": str(folder)}
            response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=sent)
            assert (response.status_code, error_of(response)["code"]) == (400, "adapter_invalid")
            assert "symbolic link" in error_of(response)["message"]

    @pytest.mark.parametrize("has_free_paths", [True, False])
    def test_links_are_followed_if_their_targets_may_be_loaded(self, tmp_path: Path, has_free_paths: bool) -> None:
        folder = self._linked(tmp_path)
        served = make_settings(tmp_path, has_free_paths=has_free_paths, adapter_roots=[tmp_path])
        with live_server(says(TEXT), served) as server:
            sent = {"lora_name": "new", "lora_path": str(folder)}
            response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=sent)
            assert "adapter_model.safetensors is missing" in error_of(response)["message"]

    def _linked(self, tmp_path: Path) -> Path:
        """An adapter folder without weights whose config links to a file elsewhere in `tmp_path`."""
        (tmp_path / "secret.json").write_text('{"peft_type": "LORA"}')
        folder = tmp_path / "adapter"
        folder.mkdir()
        (folder / "adapter_config.json").symlink_to(tmp_path / "secret.json")
        return folder

    def test_a_path_may_start_with_a_tilde_if_any_path_is_allowed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._linked(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        with live_server(says(TEXT), make_settings(tmp_path, has_free_paths=True)) as server:
            for path, message in (("~/adapter", "safetensors is missing"), ("~no-such-user/a", "'~no-such-user/a'")):
                sent = {"lora_name": "new", "lora_path": path}
                response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=sent)
                assert response.status_code == 404
                assert message in error_of(response)["message"]

    @pytest.mark.parametrize("name", ["", None, "tiny", "org/tiny-alias", "elsewhere/Tiny", "org/Base-1B"])
    def test_a_load_may_name_the_served_base_model(self, tmp_path: Path, name: str | None) -> None:
        served = make_settings(tmp_path, has_free_paths=True, model="/models/base-1b/")
        with live_server(says(TEXT), served) as server:
            sent = {"lora_name": "new", "lora_path": str(tmp_path / "no"), "base_model_name": name}
            response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=sent)
            assert (response.status_code, error_of(response)["param"]) == (404, "lora_path")

    def test_an_invalid_adapter_name_is_refused_naming_its_field(self, tmp_path: Path) -> None:
        with live_server(says(TEXT), make_settings(tmp_path, has_free_paths=True)) as server:
            sent = {"lora_name": "a b", "lora_path": str(tmp_path)}
            response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=sent)
            assert (response.status_code, error_of(response)["param"]) == (400, "lora_name")
            assert error_of(response)["message"].startswith("'lora_name' is refused: ")

    def test_a_load_for_another_base_model_is_refused(self, tmp_path: Path) -> None:
        with live_server(says(TEXT), make_settings(tmp_path, has_free_paths=True)) as server:
            sent = {"lora_name": "new", "lora_path": str(tmp_path), "base_model_name": "org/other"}
            response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=sent)
            assert (response.status_code, error_of(response)["code"]) == (400, "invalid_value")
            assert error_of(response)["param"] == "base_model_name"
            assert "'org/other'" in error_of(response)["message"]
            assert "tiny" in error_of(response)["message"]

    def test_load_and_unload_return_vllms_texts_and_statuses(self, tmp_path: Path) -> None:
        with live_server(says(TEXT), make_settings(tmp_path, has_free_paths=True), ("sql",)) as server:
            loaded = httpx.post(
                f"{server.url}/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": str(tmp_path)}
            )
            assert loaded.status_code == 400
            assert "already been loaded" in error_of(loaded)["message"]
            missing = httpx.post(
                f"{server.url}/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": str(tmp_path / "no")}
            )
            assert missing.status_code == 404
            empty = httpx.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": ""})
            assert (empty.status_code, error_of(empty)["param"]) == (400, "lora_path")
            no_adapter = httpx.post(
                f"{server.url}/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": str(tmp_path)}
            )
            assert no_adapter.status_code == 404, no_adapter.text
            unloaded = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "sql"})
            assert unloaded.status_code == 200
            assert unloaded.headers["content-type"].startswith("text/plain")
            assert unloaded.text == "Success: LoRA adapter 'sql' removed successfully."
            again = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "sql"})
            assert (again.status_code, error_of(again)["code"]) == (404, "adapter_not_found")
            assert error_of(again)["param"] == "lora_name"


class TestProcessingTime:
    def test_inference_reports_the_time_until_the_response_began(self, tmp_path: Path) -> None:
        engine = says(TEXT)
        engine.step_s = 0.03
        with live_server(engine, make_settings(tmp_path), ("sql",)) as server:
            body = {"model": "sql", "prompt": "x", "max_tokens": 2}
            chat = {"model": "sql", "messages": USER, "max_tokens": 2}
            for path, sent in (
                ("/v1/completions", body),
                ("/adapters/sql/v1/completions", body),
                ("/v1/chat/completions", chat),
                ("/adapters/sql/v1/chat/completions", chat),
            ):
                for stream, at_least_ms in ((False, 50), (True, 25)):
                    response = httpx.post(server.url + path, json={**sent, "stream": stream})
                    assert response.status_code == 200
                    assert int(response.headers["openai-processing-ms"]) >= at_least_ms
            refused = httpx.post(f"{server.url}/v1/completions", json={})
            assert refused.status_code == 400
            assert int(refused.headers["openai-processing-ms"]) >= 0
            assert "openai-processing-ms" not in httpx.get(f"{server.url}/v1/models").headers
            assert "openai-processing-ms" not in httpx.get(f"{server.url}/nothing").headers


class TestDocuments:
    @pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ping", "/version"])
    def test_probes_may_use_head(self, http: httpx.Client, path: str) -> None:
        response = http.head(path)
        assert (response.status_code, response.content) == (http.get(path).status_code, b"")
        assert response.headers["x-request-id"]

    def test_version_metrics_and_ping_are_served(self, http: httpx.Client) -> None:
        assert http.get("/version").json()["version"]
        response = http.get("/metrics")
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "vllm:num_requests_running" in response.text
        assert http.get("/ping").content == b""

    def test_openapi_describes_bodies_answers_and_errors(self, http: httpx.Client) -> None:
        document = http.get("/schema/openapi.json").json()
        schemas = document["components"]["schemas"]
        post = document["paths"]["/v1/chat/completions"]["post"]
        body = post["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert body == "ChatCompletionRequest"
        assert schemas[body]["additionalProperties"] is False
        assert {"messages", "temperature", "stream"} <= schemas[body]["properties"].keys()
        assert {"200", "400", "401", "404", "413", "429", "500", "503"} <= post["responses"].keys()
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if "requestBody" in operation:
                    assert method in ("post", "put", "patch"), path
                else:
                    assert method in ("get", "head", "delete") or path.endswith(("/commit", "/restore")), path
        references = {part.partition('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
        assert references <= schemas.keys()

    def test_there_are_no_documentation_pages(self, http: httpx.Client) -> None:
        for path in ("/schema/redoc", "/schema/swagger", "/schema/elements", "/schema/rapidoc"):
            assert http.get(path).status_code == 404
        assert "html" not in http.get("/schema").headers["content-type"]

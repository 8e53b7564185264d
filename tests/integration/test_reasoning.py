"""Separation of reasoning from content, through the unmodified openai client and raw HTTP, with a fake engine."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.responses import Response
from tokenizers import AddedToken

from loraserve.engine.request import ReasoningLimit, ReasoningTokens
from loraserve.serving.text.reasoning import ReasoningFormat
from loraserve.serving.tool_calls.formats import ToolCallFormat
from tests.integration import test_messages_api
from tests.integration.test_responses_api import events_of, without_call_ids
from tests.support.fake_engine_client import FakeEngine, make_model, make_tokenizer
from tests.support.live_server import LiveServer, live_server, make_settings

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if mode == 'begun' %}<think>\n{% endif %}"
    "{% if mode == 'none' %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
USER: Any = {"role": "user", "content": "2 + 2?"}
ASKED: Any = {"model": "tiny", "messages": [USER]}
BEGUN, NONE = ({"chat_template_kwargs": {"mode": mode}} for mode in ("begun", "none"))


def make_thinking_tokenizer(marks: tuple[str, ...] = ("<think>", "</think>"), *, special: bool = False) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return tokenizer


TOKENIZER = make_thinking_tokenizer()
OPENING_ID, CLOSING_ID = TOKENIZER.token_to_id("<think>"), TOKENIZER.token_to_id("</think>")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    engine = FakeEngine(model=make_model(TOKENIZER, chat_template=TEMPLATE))
    settings = make_settings(
        tmp_path_factory.mktemp("data"),
        tool_call_parser=ToolCallFormat.HERMES,
        reasoning_parser=ReasoningFormat.QWEN3,
    )
    with live_server(engine, settings) as server:
        yield server


@contextmanager
def thinking_server(
    data_dir: Path, tokenizer: Any, parser: ReasoningFormat = ReasoningFormat.QWEN3
) -> Iterator[tuple[LiveServer, openai.OpenAI]]:
    engine = FakeEngine(model=make_model(tokenizer, chat_template=TEMPLATE))
    with (
        live_server(engine, make_settings(data_dir, reasoning_parser=parser)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0) as client,
    ):
        yield server, client


EXTRA = ("chat_template_kwargs", "include_reasoning", "thinking_token_budget")


def message_of(client: openai.OpenAI, **fields: Any) -> Any:
    """The answered message, or one per choice; checks that the streamed answer is the same."""
    extra = {name: fields.pop(name) for name in EXTRA if name in fields}
    whole = client.chat.completions.create(**ASKED, **fields, extra_body=extra)
    chunks = [*client.chat.completions.create(**ASKED, **fields, extra_body=extra, stream=True)]
    for choice in whole.choices:
        deltas = [each.delta for chunk in chunks for each in chunk.choices if each.index == choice.index]
        for name in ("content", "reasoning_content", "reasoning"):
            told = "".join(getattr(delta, name, None) or "" for delta in deltas)
            assert told == (getattr(choice.message, name, None) or "")
    return whole.choices[0].message if len(whole.choices) == 1 else [choice.message for choice in whole.choices]


class TestChats:
    @pytest.mark.parametrize(
        ("text", "fields", "reasoning", "content"),
        [
            ("<think>\nTwo and two.\n</think>\n\n4", {}, "Two and two.", "4"),
            ("Two and two.\n</think>\n\n4", BEGUN, "Two and two.", "4"),
            ("4 </think>", {}, None, "4 </think>"),
            ("4", NONE, None, "4"),
            ("Two and", BEGUN, "Two and", None),
            ("", {}, None, ""),
            ("<think></think>", {}, None, ""),
        ],
    )
    def test_reasoning_is_separated_from_content(
        self, client: openai.OpenAI, answer: Callable[..., None], text: str, fields: Any, reasoning: Any, content: Any
    ) -> None:
        answer(text)
        message = message_of(client, **fields)
        assert (message.reasoning_content, message.reasoning, message.content) == (reasoning, reasoning, content)

    def test_choices_are_parsed_independently(self, client: openai.OpenAI, answer: Callable[..., None]) -> None:
        answer("<think>Hm.</think>4", "4", "<think>So")
        messages = message_of(client, n=3)
        assert [(each.reasoning_content, each.content) for each in messages] == [
            ("Hm.", "4"),
            (None, "4"),
            ("So", None),
        ]

    def test_reasoning_can_be_left_out(
        self, client: openai.OpenAI, http: httpx.Client, answer: Callable[..., None]
    ) -> None:
        answer("<think>Two and two.</think>4")
        message = message_of(client, include_reasoning=False)
        assert message.content == "4"
        assert not {"reasoning", "reasoning_content"} & message.to_dict().keys()
        usage = http.post("/v1/chat/completions", json={**ASKED, "include_reasoning": False}).json()["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] > 2

    def test_reasoning_tokens_are_counted(self, client: openai.OpenAI, answer: Callable[..., None]) -> None:
        for text, fields, num_tokens in (
            ("<think>abc</think>", {}, None),
            ("abc</think>", BEGUN, None),
            ("abc", {}, 0),
        ):
            answer(f"{text}4")
            expected = len(TOKENIZER.encode(text, add_special_tokens=False).ids) if num_tokens is None else num_tokens
            whole = client.chat.completions.create(**ASKED, extra_body=fields).usage
            options: Any = {"include_usage": True}
            *_, last = client.chat.completions.create(**ASKED, extra_body=fields, stream=True, stream_options=options)
            for usage in (whole, last.usage):
                assert usage
                assert usage.completion_tokens_details
                assert usage.completion_tokens_details.reasoning_tokens == expected

    def test_text_held_back_for_a_stop_string_does_not_change_the_reasoning_token_count(
        self, http: httpx.Client, answer: Callable[..., None]
    ) -> None:
        answer("abc</think>4 + 4")
        expected = len(TOKENIZER.encode("abc</think>", add_special_tokens=False).ids)
        for stop in ("</think>4 + 5", "4 + 4 is", "+ 4"):
            usage = http.post("/v1/chat/completions", json={**ASKED, **BEGUN, "stop": stop}).json()["usage"]
            assert usage["completion_tokens_details"]["reasoning_tokens"] == expected

    def test_only_calls_after_the_reasoning_are_parsed(
        self, client: openai.OpenAI, answer: Callable[..., None]
    ) -> None:
        answer(f"<think>I could {CALL}.</think>\n{CALL}")
        message = message_of(client, tools=[ADD])
        assert (message.reasoning_content, message.content) == (f"I could {CALL}.", None)
        assert [call.function.arguments for call in message.tool_calls] == ['{"a": 1}']

    def test_a_stream_has_every_token_id_and_logprob(self, http: httpx.Client, answer: Callable[..., None]) -> None:
        answer("<think>Hm.</think>4")
        asked = {**ASKED, "logprobs": True, "return_token_ids": True}
        whole = http.post("/v1/chat/completions", json=asked).json()["choices"][0]
        body = http.post("/v1/chat/completions", json={**asked, "stream": True}).text
        chunks = [json.loads(block.removeprefix("data: "))["choices"][0] for block in body.split("\n\n")[:-2]]
        assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == whole["token_ids"]
        told = [token for chunk in chunks for token in (chunk["logprobs"] or {"content": []})["content"]]
        assert told == whole["logprobs"]["content"]

    @pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
    def test_reasoning_can_be_sent_back(self, http: httpx.Client, name: str) -> None:
        said = {"role": "assistant", "content": "4", name: "Two and two."}
        tokens = http.post("/tokenize", json={"messages": [USER, said, USER]}).json()["tokens"]
        prompt = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert "<|assistant|><think>Two and two.</think>4<|end|>" in prompt
        refused = http.post("/tokenize", json={"messages": [{**USER, name: "x"}]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"messages[0].{name}")

    def test_a_continued_message_has_no_reasoning(self, client: openai.OpenAI, answer: Callable[..., None]) -> None:
        answer("4")
        fields: Any = {"continue_final_message": True, "add_generation_prompt": False}
        said: Any = {"role": "assistant", "content": "It is "}
        choice = client.chat.completions.create(model="tiny", messages=[USER, said], extra_body=fields).choices[0]
        assert (choice.message.content, choice.message.to_dict()["reasoning_content"]) == ("4", None)


class TestMessages:
    """Anthropic's API."""

    @pytest.fixture
    def messages(self, server: LiveServer) -> Iterator[Callable[..., anthropic.types.Message]]:
        """Requests an answer and checks that the streamed one is the same."""
        with anthropic.Anthropic(base_url=server.url, api_key="anything", max_retries=0) as client:

            def ask(**fields: Any) -> anthropic.types.Message:
                extra = {"request_id": "r1", **fields.pop("extra", {})}
                asked: Any = {**ASKED, "max_tokens": 90, **fields, "extra_body": extra}
                whole = client.messages.create(**asked)
                streamed = test_messages_api.put_together(client, **asked)
                assert test_messages_api.without_call_ids(streamed) == test_messages_api.without_call_ids(whole)
                return whole

            yield ask

    @pytest.mark.parametrize(
        ("text", "fields", "said"),
        [
            ("<think>\nTwo and two.\n</think>\n\n4", {}, [("thinking", "Two and two."), ("text", "4")]),
            ("Two and two.\n</think>\n\n4", BEGUN, [("thinking", "Two and two."), ("text", "4")]),
            ("4 </think>", {}, [("text", "4 </think>")]),
            ("Two and", BEGUN, [("thinking", "Two and")]),
            ("<think></think>", {}, []),
        ],
    )
    def test_thinking_is_a_separate_block(
        self, messages: Callable[..., Any], answer: Callable[..., None], text: str, fields: Any, said: Any
    ) -> None:
        answer(text)
        message = messages(extra=fields)
        assert [(block.type, getattr(block, block.type)) for block in message.content] == said
        thoughts = [block for block in message.content if block.type == "thinking"]
        assert {block.signature for block in thoughts} <= {"unsigned"}
        assert (message.usage.output_tokens_details.thinking_tokens > 0) == bool(thoughts or "<think>" in text)

    def test_thinking_comes_before_calls_and_can_be_sent_back(
        self, server: LiveServer, messages: Callable[..., Any], answer: Callable[..., None]
    ) -> None:
        answer(f"<think>I add.</think>\n{CALL}")
        tool: Any = {"name": "add", "input_schema": {"type": "object"}}
        thinking: Any = {"type": "enabled", "budget_tokens": 89}
        message = messages(tools=[tool], thinking=thinking)
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        assert message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": message.content[1].id, "content": "3"}
        said = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        messages(tools=[tool], thinking=thinking, messages=said)
        prompt = TOKENIZER.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
        assert "<think>I add.</think>" in prompt

    def test_thinking_settings_that_cannot_be_honored_are_refused(
        self, http: httpx.Client, messages: Callable[..., Any], answer: Callable[..., None]
    ) -> None:
        answer("4")
        messages(thinking={"type": "disabled"})
        for fields, message in (
            (
                {"thinking": {"type": "disabled"}, **BEGUN},
                "'thinking.type' is 'disabled', but this model always reasons first",
            ),
            (
                {"output_config": {"effort": "low"}},
                "'output_config.effort' is 'low'; the model's chat template takes no",
            ),
        ):
            refused = http.post("/v1/messages", json={**ASKED, "max_tokens": 90, **fields})
            assert refused.status_code == 400
            assert message in refused.json()["error"]["message"]


def test_unsupported_reasoning_efforts_are_refused(http: httpx.Client) -> None:
    for path, name, value, body in (
        ("/v1/chat/completions", "reasoning_effort", "enormous", {**ASKED, "reasoning_effort": "enormous"}),
        ("/v1/chat/completions", "reasoning_effort", "high", {**ASKED, "reasoning_effort": "high"}),
        ("/v1/chat/completions", "reasoning_effort", "none", {**ASKED, **BEGUN, "reasoning_effort": "none"}),
        ("/v1/responses", "reasoning.effort", "high", {"model": "tiny", "input": "x", "reasoning": {"effort": "high"}}),
    ):
        refused = http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert repr(value) in refused.json()["error"]["message"]
    http.post("/v1/chat/completions", json={**ASKED, "reasoning_effort": "none"}).raise_for_status()


class TestGrammars:
    @pytest.mark.parametrize(
        ("fields", "reasoning"),
        [
            ({}, ReasoningTokens(OPENING_ID, CLOSING_ID)),
            (NONE, ReasoningTokens(OPENING_ID, CLOSING_ID)),
            (BEGUN, ReasoningTokens(None, CLOSING_ID)),
        ],
    )
    @pytest.mark.parametrize(
        "held", [{"response_format": {"type": "json_object"}}, {"tools": [ADD], "tool_choice": "required"}]
    )
    def test_a_grammar_applies_after_the_reasoning(
        self, server: LiveServer, http: httpx.Client, fields: Any, held: Any, reasoning: ReasoningTokens
    ) -> None:
        http.post("/v1/chat/completions", json={**ASKED, **fields, **held, "max_tokens": 1}).raise_for_status()
        grammar = server.engine.requests[-1].sampling.grammar
        assert grammar is not None
        assert grammar.reasoning == reasoning

    def test_with_a_grammar_a_mark_spelled_in_other_tokens_does_not_end_the_reasoning(
        self, server: LiveServer, client: openai.OpenAI, answer: Callable[..., None]
    ) -> None:
        answer("")
        pieces = ["Hm. </", "think", "> {", "x" * 200]
        spelt = [each for piece in pieces for each in TOKENIZER.encode(piece, add_special_tokens=False).ids]
        call = TOKENIZER.encode('[{"name": "add", "parameters": {}}]', add_special_tokens=False).ids
        server.engine.reply = lambda asked, index: [*spelt, CLOSING_ID, *call, 1]
        message = message_of(client, tools=[ADD], tool_choice="required", **BEGUN)
        assert (message.reasoning_content, message.content) == ("".join(pieces), None)
        assert [call.function.arguments for call in message.tool_calls] == ["{}"]
        assert message_of(client, **BEGUN).reasoning_content == "Hm.", "where nothing is held, a mark is a text"

    def test_a_grammar_does_not_wait_for_a_mark_outside_the_models_vocabulary(
        self, server: LiveServer, client: openai.OpenAI, answer: Callable[..., None]
    ) -> None:
        answer("abc")
        usual, server.engine.model = server.engine.model, replace(server.engine.model, vocab_size=CLOSING_ID)
        try:
            held: Any = {"type": "json_object"}
            client.chat.completions.create(**ASKED, response_format=held, extra_body=BEGUN)
        finally:
            server.engine.model = usual
        grammar = server.engine.requests[-1].sampling.grammar
        assert grammar is not None
        assert grammar.reasoning is None

    def test_a_forced_call_follows_the_reasoning(self, client: openai.OpenAI, answer: Callable[..., None]) -> None:
        for choice, text in (
            ("required", '[{"name": "add", "parameters": {"a": 1}}]'),
            ({"type": "function", "function": {"name": "add"}}, '{"a": 1}'),
        ):
            answer(f"Hm.</think>{text}")
            message = message_of(client, tools=[ADD], tool_choice=choice, **BEGUN)
            assert (message.reasoning_content, message.content) == ("Hm.", None)
            assert [call.function.arguments for call in message.tool_calls] == ['{"a": 1}']


class TestBudgets:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", {**ASKED, "thinking_token_budget": 7}),
            ("/v1/chat/completions", {**ASKED, "thinking_token_budget": 0}),
            ("/v1/responses", {"model": "tiny", "input": "2 + 2?", "thinking_token_budget": 7}),
            ("/v1/messages", {**ASKED, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 7}}),
        ],
    )
    @pytest.mark.parametrize(("mode", "opening_id"), [({}, OPENING_ID), (NONE, OPENING_ID), (BEGUN, None)])
    def test_the_engine_gets_the_limit_and_the_marks(
        self, server: LiveServer, http: httpx.Client, path: str, body: Any, mode: Any, opening_id: int | None
    ) -> None:
        http.post(path, json={**body, **mode}).raise_for_status()
        limit = server.engine.requests[-1].sampling.reasoning_limit
        tokens = ReasoningTokens(opening_id, CLOSING_ID, opens_within=2)
        assert limit == ReasoningLimit(tokens, body.get("thinking_token_budget", 7))

    def test_with_a_budget_only_the_token_ends_the_reasoning(
        self, server: LiveServer, client: openai.OpenAI, answer: Callable[..., None]
    ) -> None:
        answer("")
        pieces = ["Hm. </", "think", "> "]
        spelt = [each for piece in pieces for each in TOKENIZER.encode(piece, add_special_tokens=False).ids]
        said = TOKENIZER.encode("4 </think>", add_special_tokens=False).ids
        server.engine.reply = lambda asked, index: [*spelt, CLOSING_ID, *said, 1]
        message = message_of(client, thinking_token_budget=99, **BEGUN)
        assert (message.reasoning_content, message.content) == ("Hm. </think>", "4 </think>")

    def test_the_limit_holds_for_reasoning_before_a_format_too(self, server: LiveServer, http: httpx.Client) -> None:
        body = {**ASKED, **BEGUN, "response_format": {"type": "json_object"}, "thinking_token_budget": 3}
        http.post("/v1/chat/completions", json=body).raise_for_status()
        sampling = server.engine.requests[-1].sampling
        assert sampling.grammar is not None
        assert sampling.grammar.reasoning is not None
        assert sampling.reasoning_limit == ReasoningLimit(sampling.grammar.reasoning, 3)

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", ASKED),
            ("/v1/chat/completions", {**ASKED, "thinking_token_budget": -1}),
            ("/v1/chat/completions", {**ASKED, "thinking_token_budget": None}),
            ("/v1/responses", {"model": "tiny", "input": "2 + 2?", "thinking_token_budget": -1}),
            ("/v1/messages", {**ASKED, "max_tokens": 8, "thinking": {"type": "enabled", "budget_tokens": 7}}),
            ("/v1/messages", {**ASKED, "max_tokens": 9, "thinking": {"type": "adaptive"}}),
        ],
    )
    def test_there_is_no_limit_unless_one_is_asked_for(
        self, server: LiveServer, http: httpx.Client, path: str, body: Any
    ) -> None:
        http.post(path, json=body).raise_for_status()
        assert server.engine.requests[-1].sampling.reasoning_limit is None

    @pytest.mark.parametrize(("budget", "message"), [(-2, "is -2; it must be between -1"), (1.5, "got `float`")])
    def test_a_wrong_budget_is_refused(self, http: httpx.Client, budget: float, message: str) -> None:
        for path, body in (("/v1/chat/completions", ASKED), ("/v1/responses", {"model": "tiny", "input": "x"})):
            refused = http.post(path, json={**body, "thinking_token_budget": budget})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_token_budget")
            assert message in refused.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"allowed_token_ids": [5, 6]}, "allowed_token_ids"),
            ({"stop_token_ids": [CLOSING_ID], "min_tokens": 1}, "stop_token_ids"),
        ],
    )
    def test_a_budget_needs_the_token_that_ends_the_reasoning(
        self, http: httpx.Client, fields: dict[str, Any], param: str
    ) -> None:
        body = {**ASKED, **fields, "thinking_token_budget": 9, "max_tokens": 20}
        refused = http.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert str(CLOSING_ID) in refused.json()["error"]["message"]
        del body["thinking_token_budget"]
        http.post("/v1/chat/completions", json=body).raise_for_status()

    def test_a_budget_is_refused_where_the_end_of_reasoning_is_unknown(self, tmp_path: Path) -> None:
        fields: Any = {"extra_body": {"thinking_token_budget": 4}}
        with thinking_server(tmp_path, make_tokenizer()) as (server, client):
            client.chat.completions.create(**ASKED, response_format={"type": "json_object"}, **fields)
            assert server.engine.requests[-1].sampling.reasoning_limit is None, "such an answer has no reasoning"
            with pytest.raises(openai.BadRequestError, match="this model has no tokens that mark reasoning") as refused:
                client.chat.completions.create(**ASKED, **fields)
            assert refused.value.param == "thinking_token_budget"


class TestMarks:
    @pytest.mark.parametrize("special", [False, True])
    def test_marks_are_recognized_as_ordinary_or_special_tokens(self, tmp_path: Path, special: bool) -> None:
        tokenizer = make_thinking_tokenizer(special=special)
        with thinking_server(tmp_path, tokenizer) as (server, client):
            token_ids = tokenizer.encode("<think>Hm.</think>4", add_special_tokens=False).ids
            server.engine.reply = lambda asked, index: [*token_ids, 1]
            message = message_of(client)
            assert (message.reasoning_content, message.content) == ("Hm.", "4")

    @pytest.mark.parametrize("marks", [("<think>",), ("</think>",), ()])
    def test_a_grammar_covers_the_whole_answer_if_the_marks_are_not_tokens(
        self, tmp_path: Path, marks: tuple[str, ...]
    ) -> None:
        tokenizer = make_thinking_tokenizer(marks)
        with thinking_server(tmp_path, tokenizer) as (server, client):
            token_ids = tokenizer.encode("<think>Hm.</think>4", add_special_tokens=False).ids
            server.engine.reply = lambda asked, index: [*token_ids, 1]
            assert message_of(client).reasoning_content == "Hm."
            message = message_of(client, response_format={"type": "json_object"})
            assert message.content == "<think>Hm.</think>4"
            assert "reasoning_content" not in message.to_dict()
            grammar = server.engine.requests[-1].sampling.grammar
            assert grammar is not None
            assert grammar.reasoning is None

    def test_the_opening_mark_may_be_missing_at_the_start_of_an_answer(self, tmp_path: Path) -> None:
        with thinking_server(tmp_path, TOKENIZER, ReasoningFormat.DEEPSEEK_R1) as (server, client):
            token_ids = TOKENIZER.encode("Hm.</think>4", add_special_tokens=False).ids
            server.engine.reply = lambda asked, index: [*token_ids, 1]
            message = message_of(client)
            assert (message.reasoning_content, message.content) == ("Hm.", "4")
            assert message_of(client, **NONE).content == "Hm.</think>4", "the prompt has ended the reasoning"
            messages: Any = [USER, {"role": "assistant", "content": "It is "}]
            fields: Any = {"continue_final_message": True, "add_generation_prompt": False}
            choice = client.chat.completions.create(model="tiny", messages=messages, extra_body=fields).choices[0]
            assert choice.message.content == "Hm.</think>4", "the answer has begun already"


class TestResponses:
    @pytest.mark.parametrize("ended", [True, False])
    @pytest.mark.parametrize(
        ("text", "kinds"),
        [
            ("<think>\nTwo and two.\n</think>\n\n4", ["reasoning", "message"]),
            (f"<think>Two.</think>\n\n{CALL}", ["reasoning", "function_call"]),
            (f"<think>Two.</think>So. {CALL}", ["reasoning", "message", "function_call"]),
            ("<think>Two", ["reasoning"]),
            ("4", ["message"]),
        ],
    )
    def test_reasoning_is_a_separate_item(
        self, http: httpx.Client, answer: Callable[..., None], text: str, kinds: list[str], ended: bool
    ) -> None:
        answer(text, ended=ended)
        asked = {"model": "tiny", "input": "2 + 2?", "tools": [{"type": "function", "name": "add"}], "request_id": "r"}
        whole = http.post("/v1/responses", json=asked).raise_for_status().json()
        Response.model_validate(whole, strict=True)
        assert [item["type"] for item in whole["output"]] == kinds
        assert (whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) == (kinds[0] == "reasoning")
        events = events_of(http.post("/v1/responses", json={**asked, "stream": True}).text)
        assert without_call_ids(events[-1]["response"]) == without_call_ids(whole)
        if kinds[0] == "reasoning":
            of_it = [event for event in events if event.get("output_index") == 0]
            names = [event["type"].removeprefix("response.") for event in of_it]
            assert names[:2] == ["output_item.added", "content_part.added"]
            assert {*names[2:-3]} == {"reasoning_text.delta"}
            assert names[-3:] == ["reasoning_text.done", "content_part.done", "output_item.done"]
            (part,) = whole["output"][0]["content"]
            assert "".join(event["delta"] for event in of_it[2:-3]) == of_it[-3]["text"] == part["text"]

    def test_reasoning_can_be_sent_back(
        self, server: LiveServer, http: httpx.Client, answer: Callable[..., None]
    ) -> None:
        answer(f"<think>Two.</think>So. {CALL}")
        tools = [{"type": "function", "name": "add"}]
        asked: Any = {"model": "tiny", "input": [USER], "tools": tools}
        output = http.post("/v1/responses", json=asked).json()["output"]
        result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "4"}
        http.post("/v1/responses", json={**asked, "input": [USER, *output, result]}).raise_for_status()
        tokens = server.engine.requests[-1].prompt_token_ids
        prompt = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert '<|assistant|><think>Two.</think>So. {"name": "add", "arguments": {"a": 1}}<|end|>\n<|tool|>4' in prompt

"""Tools, tool calls and their results, through the unmodified openai client and raw HTTP, with a fake engine."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from loraserve.engine.request import GrammarCalls, GrammarKind
from loraserve.serving.tool_calls.formats import ToolCallFormat
from tests.support.fake_engine_client import FakeEngine, make_model, make_tokenizer
from tests.support.live_server import LiveServer, live_server, make_settings

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}<quiet>{% endif %}{% endif %}"
)
TOKENIZER = make_tokenizer()
USER: Any = {"role": "user", "content": "2 + 2?"}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["b", "a"]}}}
CALL: Any = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 2}'}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """`server.engine.reply` determines the model's answers."""
    engine = FakeEngine(model=make_model(TOKENIZER, chat_template=TEMPLATE))
    settings = make_settings(tmp_path_factory.mktemp("data"), tool_call_parser=ToolCallFormat.HERMES)
    with live_server(engine, settings, ("calls",)) as server:
        yield server


def prompt_of(http: httpx.Client, **fields: Any) -> str:
    """The prompt as /tokenize renders it."""
    tokens = http.post("/tokenize", json={"messages": [USER], **fields}).json()["tokens"]
    return http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


class TestPrompts:
    def test_tools_calls_and_results_are_rendered(self, http: httpx.Client) -> None:
        calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        result = {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "4"}]}
        prompt = prompt_of(http, messages=[USER, calling, result], tools=[ADD])
        assert prompt == (
            f"{json.dumps(ADD)}\n<|user|>2 + 2?<|end|>\n"
            '<|assistant|><tool_call>{"name": "add", "arguments": {"b": 2, "a": 2}}</tool_call><|end|>\n'
            "<|tool|>4<|end|>\n<|assistant|>"
        )

    def test_a_chats_prompt_equals_the_tokens_of_tokenize(self, server: LiveServer, client: openai.OpenAI) -> None:
        fields: Any = {"chat_template_kwargs": {"enable_thinking": False}}
        client.chat.completions.create(model="calls", messages=[USER], max_tokens=1, extra_body=fields)
        with httpx.Client(base_url=server.url) as http:
            tokens = http.post("/tokenize", json={"messages": [USER], **fields}).json()["tokens"]
            assert prompt_of(http, **fields).endswith("<|assistant|><quiet>")
        assert server.engine.requests[-1].prompt_token_ids == tokens

    def test_a_chats_tools_are_in_its_prompt(
        self, server: LiveServer, client: openai.OpenAI, http: httpx.Client
    ) -> None:
        client.chat.completions.create(model="calls", messages=[USER], tools=[ADD], max_tokens=1)
        tokens = http.post("/tokenize", json={"messages": [USER], "tools": [ADD]}).json()["tokens"]
        assert server.engine.requests[-1].prompt_token_ids == tokens

    def test_tool_choice_none_leaves_the_tools_out_of_the_prompt(
        self, server: LiveServer, client: openai.OpenAI, http: httpx.Client
    ) -> None:
        client.chat.completions.create(
            model="calls", messages=[USER], tools=[ADD], tool_choice="none", parallel_tool_calls=False, max_tokens=1
        )
        tokens = http.post("/tokenize", json={"messages": [USER]}).json()["tokens"]
        assert server.engine.requests[-1].prompt_token_ids == tokens

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
            ({"chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": []}, "chat_template_kwargs"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
            (
                {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
                "tools[0].function.parameters",
            ),
            ({"tools": [ADD] * 129}, "tools"),
            ({"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 300_000}}]}, "tools"),
            ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id"),
        ],
    )
    @pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
    def test_errors_name_the_invalid_field(
        self, http: httpx.Client, path: str, fields: dict[str, Any], param: str
    ) -> None:
        response = http.post(path, json={"model": "calls", "messages": [USER], **fields})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param

    @pytest.mark.parametrize("fields", [{"tools": [ADD]}, {"chat_template_kwargs": {"a": 1}}])
    def test_tools_and_template_arguments_are_refused_for_a_plain_prompt(
        self, http: httpx.Client, fields: dict[str, Any]
    ) -> None:
        response = http.post("/tokenize", json={"prompt": "x", **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"] in fields


WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"b": 2,  "a": [2.0, "🙂"]}}\n</tool_call>'
ARGUMENTS = '{"b": 2,  "a": [2.0, "🙂"]}'
CALLING: Any = {"model": "calls", "messages": [USER], "tools": [ADD]}
REQUIRED_CALL = f'[{{"name": "add", "parameters": {ARGUMENTS}'
CUT_OFF = [
    ("[", []),
    ('[{"name": "ad', []),
    ('[{"name": "add", "parameters": ', []),
    (REQUIRED_CALL[:-6], [ARGUMENTS[:-6]]),
    (REQUIRED_CALL + '}, {"name"', [ARGUMENTS]),
]
"""Required calls cut off by `max_tokens`, and the arguments returned for them."""


def streamed(client: openai.OpenAI, **fields: Any) -> list[ChatCompletion]:
    """The openai client's snapshot after every chunk of a stream."""
    with client.chat.completions.stream(**CALLING, **fields) as stream:
        return [event.snapshot for event in stream if event.type == "chunk"]


class TestAnswers:
    def test_a_call(self, client: openai.OpenAI, answer: Callable[..., None]) -> None:
        answer(WRITTEN)
        (choice,) = client.chat.completions.create(**CALLING).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or []
        assert (call.type, call.function.name, call.function.arguments) == ("function", "add", ARGUMENTS)
        assert re.fullmatch("[a-zA-Z0-9]{9}", call.id)

    def test_a_call_beside_the_format_of_an_answer(
        self, server: LiveServer, client: openai.OpenAI, answer: Callable[..., None]
    ) -> None:
        answer(WRITTEN)
        (choice,) = client.chat.completions.create(**CALLING, response_format={"type": "json_object"}).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        asked = server.engine.requests[-1].sampling.grammar
        assert asked is not None
        assert asked.calls == GrammarCalls("<tool_call>", TOKENIZER.token_to_id("<tool_call>"))

    def test_a_streamed_call(self, client: openai.OpenAI, answer: Callable[..., None]) -> None:
        answer(WRITTEN)
        (choice,) = streamed(client)[-1].choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or []
        assert (call.type, call.function.name, call.function.arguments) == ("function", "add", ARGUMENTS)

    def test_calls_are_streamed_in_chunks(
        self, server: LiveServer, http: httpx.Client, answer: Callable[..., None]
    ) -> None:
        answer(f"Two: {WRITTEN}{WRITTEN}")
        body = http.post("/v1/chat/completions", json={**CALLING, "stream": True}).text
        blocks = body.split("\n\n")[:-2]
        choices = [json.loads(block.removeprefix("data: "))["choices"][0] for block in blocks]
        assert choices[0]["delta"] == {"role": "assistant"}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "Two: "
        calls = [choice["delta"]["tool_calls"][0] for choice in choices if "tool_calls" in choice["delta"]]
        ids = [call.pop("id") for call in calls if "id" in call]
        assert len(set(ids)) == 2
        for index in range(2):
            begun, *others = [call for call in calls if call["index"] == index]
            assert begun == {"index": index, "type": "function", "function": {"name": "add", "arguments": ""}}
            assert len(others) > (0 if server.engine.tokens_per_step == 1000 else 5)
            pieces = [call["function"]["arguments"] for call in others]
            assert others == [{"index": index, "function": {"arguments": piece}} for piece in pieces]
            assert "".join(pieces) == ARGUMENTS
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
        assert choices[-1]["delta"] == {}

    @pytest.mark.parametrize(
        "text", ["Just text.", "", " \n", "<tool_call>{}</tool_call>", '<tool_call>{"name": "add"']
    )
    def test_text_that_is_not_a_call_stays_content(
        self, client: openai.OpenAI, answer: Callable[..., None], text: str
    ) -> None:
        answer(text)
        for (choice,) in (client.chat.completions.create(**CALLING).choices, streamed(client)[-1].choices):
            assert (choice.message.content or "", choice.message.tool_calls) == (text, None)
            assert choice.finish_reason == "stop"

    def test_choices_are_parsed_independently(self, client: openai.OpenAI, answer: Callable[..., None]) -> None:
        answer("Hm.", WRITTEN, f"{WRITTEN}\n{WRITTEN}")
        for choices in (client.chat.completions.create(**CALLING, n=3).choices, streamed(client, n=3)[-1].choices):
            assert [len(choice.message.tool_calls or []) for choice in choices] == [0, 1, 2]
            assert [choice.finish_reason for choice in choices] == ["stop", "tool_calls", "tool_calls"]
            assert choices[0].message.content == "Hm."

    def test_without_parallel_calls_at_most_one_call_is_returned(
        self, client: openai.OpenAI, answer: Callable[..., None]
    ) -> None:
        answer(f"{WRITTEN}\n{WRITTEN}")
        one: Any = {"parallel_tool_calls": False}
        for choices in (client.chat.completions.create(**CALLING, **one).choices, streamed(client, **one)[-1].choices):
            assert [len(choice.message.tool_calls or []) for choice in choices] == [1]
            assert choices[0].message.content is None

    def test_a_cut_off_answer_has_finish_reason_length(
        self, client: openai.OpenAI, answer: Callable[..., None]
    ) -> None:
        answer(WRITTEN + WRITTEN[:-20], ended=False)
        for (choice,) in (client.chat.completions.create(**CALLING).choices, streamed(client)[-1].choices):
            assert (choice.finish_reason, choice.message.content) == ("length", None)
            arguments = [call.function.arguments for call in choice.message.tool_calls or []]
            assert arguments == [ARGUMENTS, ARGUMENTS[:-6]]

    @pytest.mark.parametrize(("text", "arguments"), CUT_OFF)
    def test_a_required_call_cut_off_before_its_arguments_is_left_out(
        self, client: openai.OpenAI, answer: Callable[..., None], text: str, arguments: list[str]
    ) -> None:
        answer(text, ended=False)
        asked: Any = {"tool_choice": "required"}
        for (choice,) in (
            client.chat.completions.create(**CALLING, **asked).choices,
            streamed(client, **asked)[-1].choices,
        ):
            assert (choice.finish_reason, choice.message.content or "") == ("length", "")
            assert [call.function.arguments for call in choice.message.tool_calls or []] == arguments

    @pytest.mark.parametrize("text", [WRITTEN, WRITTEN.replace("[2.0", "[None"), f"{WRITTEN}{WRITTEN}"])
    @pytest.mark.parametrize("stop", ["🙂", "}"])
    def test_arguments_cut_off_by_a_stop_string_are_not_a_finished_call(
        self, client: openai.OpenAI, answer: Callable[..., None], text: str, stop: str
    ) -> None:
        answer(text)
        asked: Any = {"stop": [stop]}
        for choices in (
            client.chat.completions.create(**CALLING, **asked).choices,
            streamed(client, **asked)[-1].choices,
        ):
            assert (choices[0].finish_reason, choices[0].message.content) == ("stop", None)
            arguments = [call.function.arguments for call in choices[0].message.tool_calls or []]
            assert arguments == [text[text.index('{"b"') : text.index(stop)]]

    @pytest.mark.parametrize("text", [WRITTEN, WRITTEN[:-13], WRITTEN.replace("[2.0", "[None")[:-15]])
    def test_a_call_that_is_not_cut_off_is_finished(
        self, client: openai.OpenAI, answer: Callable[..., None], text: str
    ) -> None:
        """Even without a closing mark, or if its arguments are not JSON."""
        answer(text)
        asked: Any = {"stop": ["</tool", "Observation:"]}
        for choices in (
            client.chat.completions.create(**CALLING, **asked).choices,
            streamed(client, **asked)[-1].choices,
        ):
            assert choices[0].finish_reason == "tool_calls"

    def test_a_surplus_call_cut_off_by_a_stop_string_is_left_out(
        self, client: openai.OpenAI, answer: Callable[..., None]
    ) -> None:
        answer(WRITTEN + WRITTEN.replace("🙂", "END"))
        asked: Any = {"stop": ["END"], "parallel_tool_calls": False}
        for choices in (
            client.chat.completions.create(**CALLING, **asked).choices,
            streamed(client, **asked)[-1].choices,
        ):
            assert choices[0].finish_reason == "tool_calls"
            assert [call.function.arguments for call in choices[0].message.tool_calls or []] == [ARGUMENTS]

    def test_tool_choice_none_leaves_calls_in_the_text(
        self, client: openai.OpenAI, answer: Callable[..., None]
    ) -> None:
        answer(WRITTEN)
        (choice,) = client.chat.completions.create(**CALLING, tool_choice="none").choices
        assert (choice.message.content, choice.message.tool_calls) == (WRITTEN, None)
        assert choice.finish_reason == "stop"

    def test_a_stream_has_every_token_id_and_logprob(self, http: httpx.Client, answer: Callable[..., None]) -> None:
        answer(f"Two: {WRITTEN}")
        asked = {**CALLING, "logprobs": True, "return_token_ids": True}
        answered = http.post("/v1/chat/completions", json=asked).json()
        body = http.post("/v1/chat/completions", json={**asked, "stream": True}).text
        events = [json.loads(block.removeprefix("data: ")) for block in body.split("\n\n")[:-2]]
        assert events[0].pop("prompt_token_ids") == answered["prompt_token_ids"]
        assert not any("prompt_token_ids" in event for event in events)
        whole, chunks = answered["choices"][0], [event["choices"][0] for event in events]
        assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == whole["token_ids"]
        told = [token for chunk in chunks for token in (chunk["logprobs"] or {"content": []})["content"]]
        assert told == whole["logprobs"]["content"]

    def test_a_too_deeply_nested_call_is_returned_but_cannot_be_sent_back(
        self, client: openai.OpenAI, answer: Callable[..., None]
    ) -> None:
        """The model wrote it, so it is returned; sending it back is refused with the limit."""
        arguments = '{"a": ' + "[" * 32 + "]" * 32 + "}"
        answer(f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>')
        whole = client.chat.completions.create(**CALLING).choices[0].message
        for message in (whole, streamed(client)[-1].choices[0].message):
            assert message.content is None
            (call,) = message.tool_calls or []
            assert (call.type, call.function.name, call.function.arguments) == ("function", "add", arguments)
        with pytest.raises(openai.BadRequestError, match="is nested 33 levels deep; the limit is 32") as refused:
            client.chat.completions.create(**{**CALLING, "messages": [USER, whole.to_dict()]})
        assert refused.value.param == "messages[1].tool_calls[0].function.arguments"

    def test_an_answered_call_can_be_sent_back(
        self, client: openai.OpenAI, http: httpx.Client, answer: Callable[..., None]
    ) -> None:
        answer(WRITTEN)
        message = client.chat.completions.create(**CALLING).choices[0].message
        calls = message.tool_calls or []
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "4"}
        prompt = prompt_of(http, messages=[USER, message.to_dict(), result])
        assert '<tool_call>{"name": "add", "arguments": {"b": 2, "a": [2.0, "🙂"]}}</tool_call>' in prompt

    def test_a_message_parsed_by_the_client_can_be_sent_back(
        self, client: openai.OpenAI, http: httpx.Client, answer: Callable[..., None]
    ) -> None:
        answer(WRITTEN)
        fields: Any = {**CALLING, "tools": [{**ADD, "function": {**ADD["function"], "strict": True}}]}
        with client.chat.completions.stream(**fields) as stream:
            streamed = stream.get_final_completion()
        whole = client.chat.completions.parse(**fields)
        for message in (whole.choices[0].message, streamed.choices[0].message):
            (call,) = message.tool_calls or []
            assert call.function.parsed_arguments == {"b": 2, "a": [2.0, "🙂"]}
            result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
            answered: Any = [USER, message, result]
            client.chat.completions.create(**{**CALLING, "messages": answered})
            prompt = prompt_of(http, messages=[USER, message.to_dict(), result])
            assert '<tool_call>{"name": "add", "arguments": {"b": 2, "a": [2.0, "🙂"]}}</tool_call>' in prompt

    def test_a_cut_off_call_can_be_sent_back(
        self, client: openai.OpenAI, http: httpx.Client, answer: Callable[..., None]
    ) -> None:
        answer('<tool_call>{"name": "add", "arguments": {"b": 2, "a', ended=False)
        message = client.chat.completions.create(**CALLING).choices[0].message
        calls = message.tool_calls or []
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "Incomplete arguments."}
        prompt = prompt_of(http, messages=[USER, message.to_dict(), result])
        assert r'<tool_call>{"name": "add", "arguments": "{\"b\": 2, \"a"}</tool_call>' in prompt


class TestRefusals:
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
    def test_forced_calls_cannot_be_combined_with_a_format_of_the_whole_answer(
        self, client: openai.OpenAI, choice: Any
    ) -> None:
        outputs = {"structured_outputs": {"json_object": True}}
        with pytest.raises(openai.BadRequestError, match="cannot be combined with 'tool_choice'") as caught:
            client.chat.completions.create(**CALLING, tool_choice=choice, extra_body=outputs)
        assert caught.value.param == "structured_outputs.json_object"

    def test_tools_are_refused_if_the_template_does_not_support_them(self, tmp_path: Path) -> None:
        settings = make_settings(tmp_path, tool_call_parser=ToolCallFormat.HERMES)
        with (
            live_server(FakeEngine(model=make_model(TOKENIZER)), settings, ("calls",)) as mute,
            openai.OpenAI(base_url=f"{mute.url}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.BadRequestError, match="chat template does not support tools") as caught,
        ):
            client.chat.completions.create(**CALLING)
        assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("call_format", "text", "marks"),
    [
        (ToolCallFormat.MISTRAL, '[TOOL_CALLS]add{"b": 2}', ["[TOOL_CALLS]"]),
        (
            ToolCallFormat.LFM2,
            "<|tool_call_start|>[add(b=2)]<|tool_call_end|>",
            ["<|tool_call_start|>", "<|tool_call_end|>"],
        ),
    ],
)
def test_a_special_token_can_open_calls(
    tmp_path: Path, call_format: ToolCallFormat, text: str, marks: list[str]
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(marks)
    token_ids = [*tokenizer.encode(text, add_special_tokens=False).ids, 1]
    model = make_model(tokenizer, chat_template=TEMPLATE)
    engine = FakeEngine(model=model, reply=lambda asked, index: token_ids)
    settings = make_settings(tmp_path, tool_call_parser=call_format)
    with (
        live_server(engine, settings, ("calls",)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        (choice,) = client.chat.completions.create(**CALLING).choices
    assert [call.function.arguments for call in choice.message.tool_calls or []] == ['{"b": 2}']
    assert choice.message.content is None


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
def test_calls_are_tagged_texts_converted_by_the_tools_schemas(tmp_path: Path, tokens_per_step: int) -> None:
    parameters = "".join(f"<parameter={name}>\n2\n</parameter>\n" for name in "ba")
    text = f"<tool_call>\n<function=add>\n{parameters}</function>\n</tool_call>"
    token_ids = [*TOKENIZER.encode(f"{text}\n{text}", add_special_tokens=False).ids, 1]
    model = make_model(TOKENIZER, chat_template=TEMPLATE)
    engine = FakeEngine(model=model, reply=lambda asked, index: token_ids, tokens_per_step=tokens_per_step)
    properties = {"b": {"type": "integer"}, "a": {"type": "string"}}
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}
    settings = make_settings(tmp_path, tool_call_parser=ToolCallFormat.QWEN3_CODER)
    with (
        live_server(engine, settings, ("calls",)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        asked: Any = CALLING | {"tools": [tool]}
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        called = [call.function.arguments for call in choice.message.tool_calls or []]
        assert called == ['{"b": 2, "a": "2"}'] * 2


def test_glms_calls_have_the_types_of_the_tools_schema(tmp_path: Path) -> None:
    """Whole and streamed; the second call has no parameters."""
    text = "<tool_call>add<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>\n<tool_call>add\n</tool_call>"
    token_ids = [*TOKENIZER.encode(text, add_special_tokens=False).ids, 1]
    model = make_model(TOKENIZER, chat_template=TEMPLATE)
    engine = FakeEngine(model=model, reply=lambda asked, index: token_ids)
    parameters = {"properties": {"b": {"type": "integer"}}}
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    settings = make_settings(tmp_path, tool_call_parser=ToolCallFormat.GLM45)
    with (
        live_server(engine, settings, ("calls",)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        asked: Any = CALLING | {"tools": [tool]}
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert [call.function.arguments for call in choice.message.tool_calls or []] == ['{"b": 2}', "{}"]


FORCED = {
    ToolCallFormat.QWEN3_CODER: "<tool_call>\n<function=add>\n<parameter=b>\n2\n</parameter>\n</function></tool_call>",
    ToolCallFormat.LFM2: "<|tool_call_start|>[add(b=2)]<|tool_call_end|>",
}


@pytest.mark.parametrize("call_format", FORCED)
def test_forced_calls_are_in_the_format_if_it_has_a_grammar(tmp_path: Path, call_format: ToolCallFormat) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["<|tool_call_start|>", "<|tool_call_end|>"])
    written = FORCED[call_format]
    replies = [written, written[: written.index("2")]]
    engine = FakeEngine(model=make_model(tokenizer, chat_template=TEMPLATE))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in replies]
    engine.reply = lambda asked, index: [*ids[0], 1] if asked.sampling.max_tokens > len(ids[1]) else ids[1]
    properties = {"b": {"type": "integer"}}
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}
    settings = make_settings(tmp_path, tool_call_parser=call_format)
    asked: Any = CALLING | {"tools": [tool]}
    named: Any = {"type": "function", "function": {"name": "add"}}
    with (
        live_server(engine, settings, ("calls",)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        for choice, reason in (("required", "tool_calls"), (named, "stop")):
            whole = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
            grammar = server.engine.requests[-1].sampling.grammar
            assert grammar is not None
            assert grammar.kind is GrammarKind.LARK
            assert [mark.token_id for mark in grammar.marks] == [
                tokenizer.token_to_id(mark.text) for mark in grammar.marks
            ]
            with client.chat.completions.stream(**asked, tool_choice=choice) as stream:
                streamed = stream.get_final_completion().choices[0]
            for each in (whole, streamed):
                assert (each.finish_reason, each.message.content) == (reason, None)
                assert [call.function.arguments for call in each.message.tool_calls or []] == ['{"b": 2}']
            short = client.chat.completions.create(**asked, tool_choice=choice, max_tokens=len(ids[1])).choices[0]
            assert (short.finish_reason, short.message.content or "") == ("length", "")
        odd = {"properties": properties, "minProperties": 1}
        asked["tools"] = [{"type": "function", "function": {"name": "add", "parameters": odd}}]
        client.chat.completions.create(**asked, tool_choice=named)
        grammar = server.engine.requests[-1].sampling.grammar
        assert grammar is not None
        assert grammar.kind is GrammarKind.JSON_SCHEMA

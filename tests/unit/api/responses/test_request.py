from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraserve.api.inference.sampling import SamplingChecker
from loraserve.api.responses.echo import begun_response
from loraserve.api.responses.kinds import refuse_kinds
from loraserve.api.responses.request import CheckedResponse, checked_response
from loraserve.api.schemas.responses import ResponsesRequest
from loraserve.api.schemas.unsupported import refuse_unsupported
from loraserve.engine.request import GrammarKind
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.settings import RequestLimits, ServingSettings
from loraserve.serving.text.reasoning import ReasoningFormat
from loraserve.serving.tool_calls.formats import ToolCallFormat
from tests.support.fake_engine_client import make_model

SETTINGS = ServingSettings(served_model_names=["tiny"], data_dir=Path(), tool_call_parser=ToolCallFormat.HERMES)
CHECKER = SamplingChecker(make_model(), RequestLimits())
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}
NOW = {"type": "function", "name": "now"}
LOGPROBS = ["message.output_text.logprobs"]


def request(**fields: Any) -> ResponsesRequest:
    return msgspec.json.decode(msgspec.json.encode({"input": "x", **fields}), type=ResponsesRequest)


def check(**fields: Any) -> CheckedResponse:
    asked = request(**fields)
    refuse_unsupported(asked)
    return checked_response(asked, CHECKER, SETTINGS)


def test_sampling_parameters_are_those_of_chats() -> None:
    params = check(
        max_output_tokens=7, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, presence_penalty=1, stop_token_ids=[5]
    ).sampling.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 3, 0.1)
    assert (params.presence_penalty, params.stop_token_ids, params.n, params.logprobs) == (1, (5,), 1, None)
    assert check(max_output_tokens=7).sampling.max_tokens == 7
    assert check(stop=["a"], seed=3).sampling.seed == 3


def test_flat_tools_are_shown_like_those_of_chats() -> None:
    checked = check(tools=[ADD, NOW])
    shown = [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "now"}},
    ]
    assert checked.conversation.tools == shown
    assert checked.use.call_format is ToolCallFormat.HERMES
    assert not checked.sampling.text.skip_special_tokens
    hidden = check(tools=[ADD], tool_choice="none")
    assert (hidden.conversation.tools, hidden.use.call_format) == ((), None)
    assert [echoed.name for echoed in begun_response(request(tools=[ADD]), hidden, "m", "id").tools] == ["add"]


def test_a_tool_choice_constrains_the_answer() -> None:
    named = check(tools=[ADD, NOW], tool_choice={"type": "function", "name": "add"})
    assert (named.use.named, named.use.schema) == ("add", SCHEMA)
    required = check(tools=[NOW], tool_choice="required", parallel_tool_calls=False)
    assert required.use.schema is not None
    assert required.use.schema["maxItems"] == 1
    assert required.sampling.params.grammar is not None


def test_a_text_format_does_not_apply_to_forced_calls() -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    fields: Any = {"tools": [NOW], "tool_choice": "required"}
    assert check(text=text, **fields).sampling.params.grammar == check(**fields).sampling.params.grammar


def test_a_text_format_constrains_the_answer() -> None:
    assert check(text={}).sampling.params.grammar is None
    assert check(text={"format": {"type": "text"}, "verbosity": "medium"}).sampling.params.grammar is None
    any_object = check(text={"format": {"type": "json_object"}}).sampling.params.grammar
    assert any_object is not None
    assert any_object.kind is GrammarKind.JSON_SCHEMA
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True, "description": "d"}
    held = check(text={"format": form}).sampling.params.grammar
    assert held is not None
    assert msgspec.json.decode(held.text)["properties"] == SCHEMA["properties"]


def test_logprobs_are_requested_with_include() -> None:
    assert check(include=LOGPROBS).sampling.params.logprobs == 0
    assert check(include=LOGPROBS, top_logprobs=4).sampling.params.logprobs == 4
    assert check(include=LOGPROBS, tools=[ADD], tool_choice="none").sampling.params.logprobs == 0
    assert check(include=["reasoning.encrypted_content"], top_logprobs=0).sampling.params.logprobs is None


def test_logprobs_are_refused_if_a_reasoning_parser_is_set() -> None:
    settings = msgspec.structs.replace(SETTINGS, reasoning_parser=ReasoningFormat.QWEN3)
    checked_response(request(include=["reasoning.encrypted_content"]), CHECKER, settings)
    with pytest.raises(ServingError, match="--reasoning-parser") as caught:
        checked_response(request(include=LOGPROBS), CHECKER, settings)
    assert caught.value.param == "include"


def test_fields_that_request_nothing_are_accepted() -> None:
    check(
        store=False,
        background=False,
        previous_response_id=None,
        conversation=None,
        prompt=None,
        truncation="disabled",
        reasoning={"effort": "none", "summary": "auto"},
        context_management=[],
        include=[],
        metadata={},
        client_metadata={"session": "x"},
        prompt_cache_key="x",
        service_tier="auto",
        tools=[],
        tool_choice="auto",
    )


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"store": True}, "store", "this server stores nothing"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send their items with 'input'"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "send their items with 'input'"),
        ({"background": True}, "background", "Answers are not stored"),
        ({"prompt": {"id": "p"}}, "prompt", "send 'instructions' and 'input'"),
        ({"truncation": "auto"}, "truncation", "'truncate_prompt_tokens': -1"),
        ({"max_tool_calls": 3}, "max_tool_calls", "Leave it out"),
        ({"moderation": {"model": "m"}}, "moderation", "Leave it out"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "Leave it out"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "Leave it out"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options", "Leave it out"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort", "must be one of none, minimal, low"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "Leave it out"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "Leave it out"),
        ({"include": [*LOGPROBS, "file_search_call.results"]}, "include[1]", "only 'message.output_text.logprobs'"),
        ({"include": LOGPROBS, "tools": [ADD]}, "include", "Send 'tool_choice': 'none'"),
        ({"include": LOGPROBS, "tools": [ADD], "tool_choice": "required"}, "include", "may call tools"),
        ({"top_logprobs": 3}, "top_logprobs", "needs 'include'"),
        ({"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"max_output_tokens": 0}, "max_output_tokens", "is 0; it must be between 1"),
        ({"stream_options": {}}, "stream_options", "'stream': true"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata", "has 17 pairs; the limit is 16"),
        ({"metadata": {"k" * 65: ""}}, "metadata", "has 65 characters in one key; the limit is 64"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "has 513 characters; the limit is 512"),
        ({"tools": [NOW, {"type": "web_search", "name": "x"}]}, "tools[1].type", "no tools of its own"),
        ({"tools": [{**NOW, "name": "a b"}]}, "tools[0].name", "must match"),
        ({"tools": [{**NOW, "defer_loading": True}]}, "tools[0].defer_loading", "not supported"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice.name",
            "'tools' has no function",
        ),
        ({"tools": [NOW], "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice.type", "'custom'"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "is 'any'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no 'tools'"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
            "cannot be combined with 'text.format'",
        ),
        (
            {
                "structured_outputs": {"json": SCHEMA},
                "tools": [NOW],
                "tool_choice": "required",
            },
            "structured_outputs.json",
            "cannot be combined with 'tool_choice'",
        ),
    ],
)
def test_invalid_and_unsupported_fields_are_refused_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ServingError) as caught:
        check(**fields)
    assert caught.value.param == param
    assert param in caught.value.message
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param", "kind"),
    [
        ({"input": [{"type": "compaction", "summary": []}]}, "input[0].type", "compaction"),
        (
            {"input": [{}, {"type": "computer_call_output", "output": {"x": 1}}]},
            "input[1].type",
            "computer_call_output",
        ),
        (
            {"input": [{"content": [{"type": "input_text"}, {"type": "input_image", "image_url": "u"}]}]},
            "input[0].content[1]",
            "input_image",
        ),
        (
            {"input": [{"type": "function_call_output", "output": [{"type": "input_file"}]}]},
            "input[0].output[0]",
            "file",
        ),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type", "file_search"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.type", "allowed_tools"),
    ],
)
def test_unknown_types_are_named_before_their_unknown_fields(fields: object, param: str, kind: str) -> None:
    with pytest.raises(ServingError, match=kind) as caught:
        refuse_kinds(msgspec.json.encode(fields))
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED_PARAMETER, param)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"input": 1}', b'{"input": [{"role": 1}], "tools": [{"nmae": "x"}]}'])
def test_other_errors_are_left_to_the_decoder(body: bytes) -> None:
    refuse_kinds(body)


def test_an_answer_echoes_the_request() -> None:
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "tools": [ADD, NOW],
        "tool_choice": {"type": "function", "name": "now"},
        "text": {"format": {"type": "text"}},
    }
    begun = msgspec.to_builtins(begun_response(request(**fields), check(**fields), "calls", "abc"))
    assert {name: begun[name] for name in fields if name != "tools"} == {
        name: value for name, value in fields.items() if name != "tools"
    }
    assert begun["tools"] == [ADD, {**NOW, "description": None, "parameters": None, "strict": None}]
    assert (begun["id"], begun["model"], begun["status"], begun["output"]) == ("resp_abc", "calls", "in_progress", [])
    plain = msgspec.to_builtins(begun_response(request(), check(), "calls", "abc"))
    assert (plain["tool_choice"], plain["parallel_tool_calls"], plain["text"]) == (
        "auto",
        True,
        {"format": {"type": "text"}},
    )

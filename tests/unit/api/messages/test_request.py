from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraserve.api.inference.sampling import SamplingChecker
from loraserve.api.messages.kinds import refuse_kinds
from loraserve.api.messages.request import CheckedMessage, checked_message, counted_conversation
from loraserve.api.schemas.messages import CountTokensRequest, MessagesRequest
from loraserve.api.schemas.unsupported import refuse_unsupported
from loraserve.engine.request import GrammarKind
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.settings import RequestLimits, ServingSettings
from loraserve.serving.text.conversation import ReasoningBudget
from loraserve.serving.text.reasoning import ReasoningFormat
from loraserve.serving.tool_calls.formats import ToolCallFormat
from tests.support.fake_engine_client import make_model

SETTINGS = ServingSettings(served_model_names=["tiny"], data_dir=Path(), tool_call_parser=ToolCallFormat.HERMES)
THINKING = msgspec.structs.replace(SETTINGS, reasoning_parser=ReasoningFormat.QWEN3)
CHECKER = SamplingChecker(make_model(), RequestLimits())
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "input_schema": SCHEMA, "strict": True}
NOW = {"name": "now", "input_schema": {}, "type": "custom"}
ENABLED = {"type": "enabled", "budget_tokens": 2000}


def request(**fields: Any) -> MessagesRequest:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, **fields}
    return msgspec.json.decode(msgspec.json.encode(body), type=MessagesRequest)


def check(settings: ServingSettings = SETTINGS, **fields: Any) -> CheckedMessage:
    asked = request(**fields)
    refuse_unsupported(asked)
    return checked_message(asked, CHECKER, settings)


def test_sampling_parameters_are_those_of_chats() -> None:
    sampling = check(temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, presence_penalty=1, seed=3).sampling
    params = sampling.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 3, 0.1)
    assert (params.presence_penalty, params.n, params.logprobs) == (1, 1, None)
    assert (sampling.max_tokens, sampling.seed) == (9, 3)


def test_stop_sequences_become_stop_strings() -> None:
    assert check(stop_sequences=["a", "b", "a"]).sampling.text.stop == ("a", "b")
    assert check(stop="a").sampling.text.stop == ("a",)
    assert check(stop_sequences=[]).sampling.text.stop == ()


def test_tools_are_shown_like_those_of_chats() -> None:
    checked = check(tools=[ADD, NOW])
    assert checked.conversation.tools == [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "now", "parameters": {}}},
    ]
    assert checked.use.call_format is ToolCallFormat.HERMES
    assert not checked.sampling.text.skip_special_tokens
    assert checked.eager_tools == frozenset()
    hidden = check(tools=[ADD], tool_choice={"type": "none"})
    assert (hidden.conversation.tools, hidden.use.call_format) == ((), None)
    eager = check(tools=[ADD | {"eager_input_streaming": True}, NOW | {"eager_input_streaming": False}])
    assert eager.eager_tools == {"add"}


def test_a_tool_choice_constrains_the_answer() -> None:
    named = check(tools=[ADD, NOW], tool_choice={"type": "tool", "name": "add"})
    assert (named.use.named, named.use.schema) == ("add", SCHEMA)
    required = check(tools=[ADD], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert required.use.schema is not None
    assert required.use.schema["maxItems"] == 1
    assert required.sampling.params.grammar is not None
    assert check(tools=[ADD], tool_choice={"type": "any"}).use.max_calls is None
    assert check(tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).use.max_calls == 1


def test_an_output_format_does_not_apply_to_forced_calls() -> None:
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    fields: Any = {"tools": [ADD], "tool_choice": {"type": "any"}}
    assert check(output_config=output, **fields).sampling.params.grammar == check(**fields).sampling.params.grammar


def test_an_output_format_constrains_the_answer() -> None:
    assert check(output_config={}).sampling.params.grammar is None
    held = check(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).sampling.params.grammar
    assert held is not None
    assert held.kind is GrammarKind.JSON_SCHEMA
    assert msgspec.json.decode(held.text)["properties"] == SCHEMA["properties"]


def test_fields_that_request_nothing_are_accepted() -> None:
    check(
        service_tier="standard_only",
        cache_control={"type": "ephemeral", "ttl": "1h"},
        container=None,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        diagnostics=None,
        inference_geo=None,
        mcp_servers=[],
        metadata={"user_id": None},
        output_config={"format": None, "effort": None, "task_budget": None},
        speed="standard",
        thinking={"type": "adaptive", "display": "summarized"},
        tools=[ADD | {"allowed_callers": ["direct"], "defer_loading": False, "input_examples": [], "type": None}],
        tool_choice={"type": "auto", "name": None},
    )


@pytest.mark.parametrize(
    ("settings", "thinking"),
    [
        (SETTINGS, ENABLED),
        (SETTINGS, ENABLED | {"budget_tokens": 1}),
        (THINKING, ENABLED | {"budget_tokens": 8}),
        (THINKING, ENABLED),
        (THINKING, {"type": "adaptive"}),
        (THINKING, {"type": "disabled"}),
    ],
)
def test_a_thinking_budget_that_nothing_could_exceed_is_no_limit(settings: ServingSettings, thinking: object) -> None:
    assert check(settings, thinking=thinking).conversation.budget is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "is 0; it must be between 1"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences", "contains an empty string"),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop", "cannot be combined with 'stop_sequences'"),
        ({"service_tier": "flex"}, "service_tier", "must be 'auto' or 'standard_only'"),
        ({"store": True}, "store", "this server stores nothing"),
        ({"container": "c"}, "container", "Leave it out"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "no tools of its own"),
        ({"speed": "fast"}, "speed", "Leave it out"),
        ({"thread": {"type": "create"}}, "thread", "send the messages so far"),
        ({"diagnostics": {"previous_message_id": None}}, "diagnostics", "Leave it out"),
        ({"inference_geo": "us"}, "inference_geo", "Leave it out"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management",
            "Leave it out",
        ),
        ({"output_config": {"task_budget": {"type": "tokens"}}}, "output_config.task_budget", "Leave it out"),
        ({"output_config": {"effort": "none"}}, "output_config.effort", "must be one of low, medium, high"),
        ({"system": [{"type": "text", "text": "x", "citations": [{}]}]}, "system[0].citations", "Leave it out"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "'between_tools'"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "is missing"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens", "only for"),
        ({"thinking": ENABLED | {"budget_tokens": 0}}, "thinking.budget_tokens", "is 0; it must be between 1"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display", "always returned in full"),
        ({"tools": [NOW, NOW | {"type": "bash_20250124"}]}, "tools[1].type", "no tools of its own"),
        ({"tools": [{**NOW, "name": "a b"}]}, "tools[0].name", "must match"),
        ({"tools": [{**NOW, "defer_loading": True}]}, "tools[0].defer_loading", "not supported"),
        ({"tools": [{**NOW, "input_examples": [{}]}]}, "tools[0].input_examples", "not supported"),
        ({"tools": [{**NOW, "allowed_callers": ["code"]}]}, "tools[0].allowed_callers", "not supported"),
        ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name", "'tools' has no function"),
        ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "tool_choice.name", "is missing"),
        ({"tools": [NOW], "tool_choice": {"type": "any", "name": "now"}}, "tool_choice.name", "only for the type"),
        ({"tools": [NOW], "tool_choice": {"type": "required"}}, "tool_choice.type", "'required'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "there are no 'tools'"),
        (
            {
                "structured_outputs": {"json": SCHEMA},
                "tools": [ADD],
                "tool_choice": {"type": "any"},
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


def test_a_thinking_budget_below_max_tokens_is_a_limit() -> None:
    budget = check(THINKING, thinking=ENABLED | {"budget_tokens": 7}).conversation.budget
    assert budget == ReasoningBudget("thinking.budget_tokens", 7)


def test_counted_tokens_are_of_the_same_conversation_as_a_message() -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "system": "s",
        "tools": [ADD],
        "tool_choice": {"type": "auto"},
        "thinking": ENABLED,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    asked = msgspec.json.decode(msgspec.json.encode(fields), type=CountTokensRequest)
    assert counted_conversation(asked, THINKING) == check(**fields).conversation


@pytest.mark.parametrize(
    ("fields", "param", "kind"),
    [
        (
            {"messages": [{}, {"content": [{"type": "text"}, {"type": "image"}]}]},
            "messages[1].content[1].type",
            "image",
        ),
        ({"messages": [{"content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0].type", "document"),
        (
            {"messages": [{"content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            "messages[0].content[0].content[0].type",
            "image",
        ),
        (
            {"messages": [{"content": [{"type": "web_search_tool_result", "content": {"type": "error"}}]}]},
            "messages[0].content[0].type",
            "web_search_tool_result",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type", "image"),
        ({"tools": [{"type": "web_search_20250305", "max_uses": 1}]}, "tools[0].type", "web_search_20250305"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.type", "function"),
        ({"thinking": {"type": "budgeted", "tokens": 1}}, "thinking.type", "budgeted"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "xml"),
    ],
)
def test_unknown_types_are_named_before_their_unknown_fields(fields: object, param: str, kind: str) -> None:
    with pytest.raises(ServingError, match=kind) as caught:
        refuse_kinds(msgspec.json.encode(fields))
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED_PARAMETER, param)


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"messages": 1}', b'{"messages": [{"role": 1}], "tools": [{"nmae": "x"}], "thinking": {}}']
)
def test_other_errors_are_left_to_the_decoder(body: bytes) -> None:
    refuse_kinds(body)

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraserve.api.chat.forced_calls import NO_PARAMETERS
from loraserve.api.chat.tools import ToolUse, checked_tools, tool_use
from loraserve.api.schemas.chat import ChatCompletionRequest
from loraserve.engine.request import GrammarCalls
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.settings import RequestLimits, ServingSettings
from loraserve.serving.text.conversation import JsonObject
from loraserve.serving.tool_calls.formats import ToolCallFormat

LIMITS = RequestLimits(max_tools=3, max_tools_bytes=200)
SETTINGS = ServingSettings(
    served_model_names=["tiny"], data_dir=Path(), limits=LIMITS, tool_call_parser=ToolCallFormat.HERMES
)
SCHEMA = {"type": "object", "properties": {"b": {"type": "number"}, "a": {"enum": [1, None]}}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", **function}}


def asked(**fields: object) -> ChatCompletionRequest:
    return msgspec.json.decode(msgspec.json.encode({"messages": [], **fields}), type=ChatCompletionRequest)


def tools_of(*tools: object) -> list[JsonObject]:
    return checked_tools(asked(tools=tools).tools, LIMITS)


def test_templates_get_the_tools_as_sent_without_what_is_for_the_server() -> None:
    given = tool(description="Adds.", parameters=SCHEMA)
    assert tools_of(given, tool()) == [given, tool()]
    assert list(tools_of(given)[0]["function"]["parameters"]["properties"]) == ["b", "a"]
    assert tools_of(tool(strict=True)) == [tool()]
    mark = {"cache_control": {"type": "ephemeral"}}
    assert tools_of(tool(**mark) | mark) == [tool()]
    assert tools_of() == []
    assert checked_tools(None, LIMITS) == []


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "custom", "custom": {"name": "x"}}, "tools[1].type"),
        ({"type": "function"}, "tools[1].function"),
        (tool(name=""), "tools[1].function.name"),
        (tool(name="no.dots"), "tools[1].function.name"),
        (tool(name="add\n"), "tools[1].function.name"),
        (tool(name="n" * 65), "tools[1].function.name"),
    ],
)
def test_errors_name_the_tool_at_fault(given: object, param: str) -> None:
    with pytest.raises(ServingError) as caught:
        tools_of(tool(), given)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([tool()] * 4, "4 tools; the limit is 3"),
        ([tool(description="é" * 99)], "201 bytes; the limit is 200"),
        ([tool(parameters={"a": "x" * 195})], "201 bytes; the limit is 200"),
    ],
)
def test_tools_are_bounded(given: list[object], shown: str) -> None:
    with pytest.raises(ServingError, match=shown) as caught:
        tools_of(*given)
    assert caught.value.param == "tools"


def use_of(**fields: object) -> ToolUse:
    return tool_use(asked(**fields), SETTINGS)


def test_tools_are_shown_and_calls_parsed_unless_the_choice_is_none() -> None:
    for choice in (None, "auto"):
        assert use_of(tools=[tool()], tool_choice=choice) == ToolUse([tool()], ToolCallFormat.HERMES)
    assert use_of(tools=[tool()], tool_choice="none") == ToolUse()
    assert use_of(tools=[tool()], parallel_tool_calls=True).max_calls is None
    assert use_of(tools=[tool()], parallel_tool_calls=False).max_calls == 1


@pytest.mark.parametrize(
    ("parser", "calls"),
    [
        (ToolCallFormat.HERMES, GrammarCalls("<tool_call>")),
        (ToolCallFormat.MISTRAL, GrammarCalls("[TOOL_CALLS]")),
        (ToolCallFormat.LLAMA3_JSON, GrammarCalls("<|python_tag|>", bare_names=("add",))),
        (ToolCallFormat.QWEN3_CODER, GrammarCalls("<tool_call>")),
        (ToolCallFormat.GLM45, GrammarCalls("<tool_call>")),
        (ToolCallFormat.LFM2, GrammarCalls("<|tool_call_start|>")),
        (ToolCallFormat.OPENAI, None),
    ],
)
def test_an_answer_in_a_format_may_be_a_call_if_the_model_chooses(
    parser: ToolCallFormat, calls: GrammarCalls | None
) -> None:
    settings = msgspec.structs.replace(SETTINGS, tool_call_parser=parser)
    assert tool_use(asked(tools=[tool()]), settings).calls == calls
    for choice in ("none", "required"):
        assert tool_use(asked(tools=[tool()], tool_choice=choice), settings).calls is None


@pytest.mark.parametrize("tools", [None, []])
def test_a_choice_without_tools_has_no_effect(tools: object) -> None:
    for choice in (None, "auto", "none"):
        assert use_of(tools=tools, tool_choice=choice, parallel_tool_calls=True) == ToolUse()


def test_tools_are_refused_without_a_tool_call_parser() -> None:
    settings = msgspec.structs.replace(SETTINGS, tool_call_parser=None)
    with pytest.raises(ServingError, match="--tool-call-parser") as caught:
        tool_use(asked(tools=[tool()]), settings)
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "tool_choice")
    assert tool_use(asked(tools=[tool()], tool_choice="none"), settings) == ToolUse()


@pytest.mark.parametrize(
    ("choice", "code", "param"),
    [
        ({"type": "allowed_tools", "allowed_tools": {}}, ErrorCode.UNSUPPORTED_PARAMETER, "tool_choice.type"),
        ({"type": "function"}, ErrorCode.MISSING_PARAMETER, "tool_choice.function"),
        ({"type": "function", "function": {"name": "x"}}, ErrorCode.INVALID_VALUE, "tool_choice.function.name"),
        ("always", ErrorCode.INVALID_VALUE, "tool_choice"),
    ],
)
def test_invalid_and_unsupported_choices_are_refused(choice: object, code: ErrorCode, param: str) -> None:
    with pytest.raises(ServingError) as caught:
        use_of(tools=[tool()], tool_choice=choice)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_without_tools_is_refused(choice: object) -> None:
    with pytest.raises(ServingError, match="tools"):
        use_of(tools=[], tool_choice=choice)


def test_forced_calls_need_no_parser() -> None:
    settings = msgspec.structs.replace(SETTINGS, tool_call_parser=None)
    required = tool_use(asked(tools=[tool()], tool_choice="required", parallel_tool_calls=False), settings)
    assert required.schema is not None
    assert (required.schema["minItems"], required.schema["maxItems"], required.named) == (1, 1, None)
    named = tool_use(asked(tools=[tool()], tool_choice={"type": "function", "function": {"name": "add"}}), settings)
    assert (named.schema, named.named) == (NO_PARAMETERS, "add")


@pytest.mark.parametrize("call_format", [ToolCallFormat.QWEN3_CODER, ToolCallFormat.LFM2])
def test_forced_calls_are_in_the_servers_format_if_it_has_a_grammar(call_format: ToolCallFormat) -> None:
    settings = msgspec.structs.replace(SETTINGS, tool_call_parser=call_format)
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        use = tool_use(asked(tools=[tool(), tool(name="sub")], tool_choice=choice), settings)
        assert (use.call_format, use.calls) == (call_format, None)
        assert use.syntax is not None
        assert ("sub" in use.syntax) == (choice == "required")
        odd = tool(parameters={"type": "object", "minProperties": 1})
        use = tool_use(asked(tools=[odd], tool_choice=choice), settings)
        assert (use.call_format, use.syntax) == (None, None)
        assert use.schema is not None


def test_a_grammar_may_not_be_longer_than_a_schema() -> None:
    """A definition is in it once for each parameter that refers to it."""
    settings = msgspec.structs.replace(SETTINGS, tool_call_parser=ToolCallFormat.LFM2)
    choice = {"type": "function", "function": {"name": "add"}}
    parameters = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"enum": ["x" * 30]}}}
    for max_schema_chars, is_short in ((1000, True), (100, False)):
        limits = RequestLimits(max_schema_chars=max_schema_chars)
        use = tool_use(
            asked(tools=[tool(parameters=parameters)], tool_choice=choice),
            msgspec.structs.replace(settings, limits=limits),
        )
        assert (use.syntax is not None) == is_short

from typing import Any

import msgspec
import pytest

from loraserve.api.schemas.chat import ChatCompletionRequest
from loraserve.api.tools import check_tool_choice, checked_tools
from loraserve.serving.conversation import JsonObject
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.settings import Limits

LIMITS = Limits(max_tools=3, max_tools_bytes=200)
SCHEMA = {"type": "object", "properties": {"b": {"type": "number"}, "a": {"enum": [1, None]}}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", **function}}


def asked(**fields: object) -> ChatCompletionRequest:
    return msgspec.json.decode(msgspec.json.encode({"messages": [], **fields}), type=ChatCompletionRequest)


def tools_of(*tools: object) -> list[JsonObject]:
    return checked_tools(asked(tools=tools).tools, LIMITS)


def test_templates_get_what_was_given_and_no_more() -> None:
    given = tool(description="Adds.", parameters=SCHEMA)
    assert tools_of(given, tool()) == [given, tool()]
    assert list(tools_of(given)[0]["function"]["parameters"]["properties"]) == ["b", "a"]
    assert tools_of(tool(strict=True)) == [tool()]
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
def test_the_tool_at_fault_is_named(given: object, param: str) -> None:
    with pytest.raises(ServingError) as caught:
        tools_of(tool(), given)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([tool()] * 4, "4 tools; the limit is 3"),
        ([tool(description="x" * 198)], "201 bytes; the limit is 200"),
        ([tool(parameters={"a": "x" * 195})], "201 bytes; the limit is 200"),
    ],
)
def test_tools_are_bounded(given: list[object], shown: str) -> None:
    with pytest.raises(ServingError, match=shown) as caught:
        tools_of(*given)
    assert caught.value.param == "tools"


def test_tools_may_be_called_unless_the_choice_is_none() -> None:
    for choice in (None, "auto"):
        assert check_tool_choice(choice, [tool()])
        assert not check_tool_choice(choice, [])
    assert not check_tool_choice("none", [tool()])


@pytest.mark.parametrize(
    ("choice", "code"),
    [
        ("required", ErrorCode.UNSUPPORTED_PARAMETER),
        ({"type": "function", "function": {"name": "add"}}, ErrorCode.UNSUPPORTED_PARAMETER),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, ErrorCode.UNSUPPORTED_PARAMETER),
        ("always", ErrorCode.INVALID_VALUE),
    ],
)
def test_other_choices_are_refused(choice: object, code: ErrorCode) -> None:
    with pytest.raises(ServingError) as caught:
        check_tool_choice(asked(tool_choice=choice).tool_choice, [tool()])
    assert (caught.value.code, caught.value.param) == (code, "tool_choice")

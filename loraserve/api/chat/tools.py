"""Checks the tools of a request and applies its `tool_choice`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from loraserve.api.chat.call_syntax import call_syntax
from loraserve.api.chat.forced_calls import schema_of_arguments, schema_of_calls
from loraserve.api.http.ranges import check_at_most, unsupported
from loraserve.api.http.raw_json import num_bytes_of, parsed
from loraserve.api.schemas.chat import ChatCompletionRequest
from loraserve.api.schemas.tools import NamedToolChoice, Tool, ToolFunction
from loraserve.engine.request import GrammarCalls
from loraserve.serving.errors import invalid_value, missing
from loraserve.serving.settings import RequestLimits, ServingSettings
from loraserve.serving.text.conversation import FUNCTION_NAME, JsonObject
from loraserve.serving.tool_calls.formats import SYNTAXES, ToolCallFormat

FUNCTION = "function"
FLAG = f"--tool-call-parser {{{','.join(ToolCallFormat)}}}"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a chat uses tools."""

    tools: Sequence[JsonObject] = ()
    """Shown to the model by the template."""
    call_format: ToolCallFormat | None = None
    """Syntax of calls in the answer; None = it is not searched for calls."""
    max_calls: int | None = None
    """Further calls are left out of the answer, as in vLLM."""
    schema: JsonObject | None = None
    """Constrains the answer, which is read as a list of calls, or as the arguments of `named`, unless there is a
    `syntax`."""
    syntax: str | None = None
    """A grammar in Lark of calls in `call_format`, to use in place of `schema`; see `call_syntax`."""
    named: str | None = None

    @property
    def calls(self) -> GrammarCalls | None:
        """Calls that the answer may consist of instead of following a format."""
        syntax = None if self.call_format is None or self.schema is not None else SYNTAXES.get(self.call_format)
        if syntax is None:
            return None
        names = [tool["function"]["name"] for tool in self.tools] if syntax.may_begin_bare else []
        return GrammarCalls(syntax.opening, bare_names=tuple(names))


class NamedTool(NamedTuple):
    """A `tool_choice` that names the function to call."""

    param: str
    """The request field that has the name."""
    name: str


def tool_use(body: ChatCompletionRequest, settings: ServingSettings) -> ToolUse:
    """The tool use of a chat. Raises `ServingError`."""
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        choice = _named_tool(choice)
    return chosen_use(checked_tools(body.tools, settings.limits), choice, body.parallel_tool_calls, settings)


def chosen_use(
    tools: Sequence[JsonObject], choice: str | NamedTool | None, parallel: bool | None, settings: ServingSettings
) -> ToolUse:
    """Applies `tool_choice` to checked tools. Raises `ServingError`.

    With the choice "none" the model does not see the tools, so it cannot call them. vLLM shows them unless it is
    started with --exclude-tools-when-tool-choice-none.
    """
    max_calls = 1 if parallel is False else None
    if isinstance(choice, NamedTool):
        named = _named(choice, tools)
        use = ToolUse(tools, schema=schema_of_arguments(named), named=named["function"]["name"])
        return _in_syntax(use, [named], 1, settings)
    if choice not in (None, "none", "auto", "required"):
        raise invalid_value("tool_choice", f"is {choice[:32]!r}; it must be 'none', 'auto', 'required' or a function.")
    if choice == "required" and not tools:
        raise invalid_value("tool_choice", "is 'required', but there are no 'tools'.")
    if not tools or choice == "none":
        return ToolUse()
    if choice == "required":
        use = ToolUse(tools, max_calls=max_calls, schema=schema_of_calls(tools, max_calls))
        return _in_syntax(use, tools, max_calls, settings)
    if settings.tool_call_parser is None:
        message = f"is 'auto', which needs a server started with {FLAG}. Or send 'none', 'required' or a function."
        raise unsupported("tool_choice", message)
    return ToolUse(tools, settings.tool_call_parser, max_calls)


def _in_syntax(
    use: ToolUse, callable_tools: Sequence[JsonObject], max_calls: int | None, settings: ServingSettings
) -> ToolUse:
    """Forced calls in the server's format, if that has a grammar for them."""
    call_format = settings.tool_call_parser
    syntax = None if call_format is None else call_syntax(call_format, callable_tools, max_calls)
    # Definitions are repeated for every parameter that refers to one.
    if syntax is None or len(syntax) > settings.limits.max_schema_chars:
        return use
    return replace(use, call_format=call_format, syntax=syntax)


def checked_tools(tools: Sequence[Tool] | None, limits: RequestLimits) -> list[JsonObject]:
    """Raises `ServingError` naming the invalid tool."""
    functions = [_function(f"tools[{index}]", tool) for index, tool in enumerate(tools or [])]
    return checked_functions(functions, limits)


def checked_functions(functions: Sequence[tuple[str, ToolFunction]], limits: RequestLimits) -> list[JsonObject]:
    """functions: each with the request field that contains it. Raises `ServingError` naming the invalid one."""
    check_at_most("tools", len(functions), limits.max_tools, "tools")
    for param, function in functions:
        check_function_name(f"{param}.name", function.name)
    check_at_most("tools", sum(_num_bytes(function) for _, function in functions), limits.max_tools_bytes, "bytes")
    return [_for_template(param, function) for param, function in functions]


def _named_tool(choice: NamedToolChoice) -> NamedTool:
    check_is_function("tool_choice", choice.type)
    if choice.function is None:
        raise missing("tool_choice.function")
    return NamedTool("tool_choice.function.name", choice.function.name)


def _named(choice: NamedTool, tools: Sequence[JsonObject]) -> JsonObject:
    named = next((tool for tool in tools if tool["function"]["name"] == choice.name), None)
    if named is None:
        raise invalid_value(choice.param, f"is {choice.name[:64]!r}, but 'tools' has no function of that name.")
    return named


def check_is_function(param: str, kind: str) -> None:
    if kind != FUNCTION:
        raise unsupported(f"{param}.type", f"is {kind[:32]!r}; only 'function' is supported.")


def check_function_name(param: str, name: str) -> None:
    if not FUNCTION_NAME.fullmatch(name):
        raise invalid_value(param, f"is {name[:64]!r}; it must match {FUNCTION_NAME.pattern}.")


def _function(param: str, tool: Tool) -> tuple[str, ToolFunction]:
    check_is_function(param, tool.type)
    if tool.function is None:
        raise missing(f"{param}.function")
    return f"{param}.function", tool.function


def _num_bytes(function: ToolFunction) -> int:
    description = (function.description or "").encode()
    return len(function.name) + len(description) + num_bytes_of(function.parameters or {})


def _for_template(param: str, function: ToolFunction) -> JsonObject:
    """Only the given fields. `strict` is left out: it is for the server, not for the model."""
    shown: JsonObject = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    if function.parameters is not None:
        shown["parameters"] = parsed(f"{param}.parameters", function.parameters)
    return {"type": FUNCTION, "function": shown}

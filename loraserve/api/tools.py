"""The tools of a request, checked, as chat templates are given them."""

from collections.abc import Sequence

from loraserve.api.ranges import check_at_most, unsupported
from loraserve.api.raw_json import num_bytes_of, parsed
from loraserve.api.schemas.tools import NamedToolChoice, Tool, ToolFunction
from loraserve.serving.conversation import FUNCTION_NAME, JsonObject
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.serving.settings import Limits

FUNCTION = "function"


def checked_tools(tools: Sequence[Tool] | None, limits: Limits) -> list[JsonObject]:
    """Raises `ServingError` naming the tool at fault."""
    tools = tools or []
    check_at_most("tools", len(tools), limits.max_tools, "tools")
    functions = [_function(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    check_at_most("tools", sum(map(_num_bytes, functions)), limits.max_tools_bytes, "bytes")
    return [_for_template(f"tools[{index}]", function) for index, function in enumerate(functions)]


def check_tool_choice(choice: str | NamedToolChoice | None, tools: Sequence[JsonObject]) -> bool:
    """Whether the model may call any of the tools. Raises `ServingError`."""
    if isinstance(choice, NamedToolChoice) or choice == "required":
        raise unsupported("tool_choice", "may only be 'none' or 'auto' on this server.")
    if choice not in (None, "none", "auto"):
        raise invalid_value("tool_choice", f"is {choice[:32]!r}; it must be 'none' or 'auto'.")
    return bool(tools) and choice != "none"


def check_function_name(param: str, name: str) -> None:
    if not FUNCTION_NAME.fullmatch(name):
        raise invalid_value(param, f"is {name[:64]!r}; it must match {FUNCTION_NAME.pattern}.")


def _function(param: str, tool: Tool) -> ToolFunction:
    if tool.type != FUNCTION:
        raise unsupported(f"{param}.type", f"is {tool.type[:32]!r}; only 'function' is supported.")
    if tool.function is None:
        message = f"'{param}.function' is missing."
        raise ServingError(ErrorCode.MISSING_PARAMETER, message, param=f"{param}.function")
    check_function_name(f"{param}.function.name", tool.function.name)
    return tool.function


def _num_bytes(function: ToolFunction) -> int:
    return len(function.name) + len(function.description or "") + num_bytes_of(function.parameters or {})


def _for_template(param: str, function: ToolFunction) -> JsonObject:
    """Only what was given. `strict` is for the server, not for the model."""
    shown: JsonObject = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    if function.parameters is not None:
        shown["parameters"] = parsed(f"{param}.function.parameters", function.parameters)
    return {"type": FUNCTION, "function": shown}

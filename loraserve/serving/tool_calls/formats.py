"""How models write tool calls; the names are vLLM's."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from msgspec import Raw

from loraserve.serving.conversation import FUNCTION_NAME


class ToolCallFormat(StrEnum):
    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, each call; also Qwen's."""
    LLAMA3_JSON = "llama3_json"
    """`{"name": …, "parameters": {…}}` as the whole answer; several with `;` between."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name{…}` for each call, as later models do."""


@dataclass(frozen=True, slots=True)
class FoundCall:
    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    opening: str
    """Begins calls, wherever it stands."""
    head: re.Pattern[str]
    """All that may be between `opening` and the first brace. Group `array`: a list of calls begins there."""
    read: Callable[[re.Match[str], str], list[FoundCall]]
    """From `head` and the JSON after it. Raises `msgspec.DecodeError` for what is no call."""
    closing: str = ""
    """Stands behind the JSON; the end of the answer will do."""
    may_begin_bare: bool = False
    """Where nothing but calls was written yet, the brace will do as an opening."""
    between: str = " \t\r\n"
    """Characters that mean nothing before, between and after calls."""


class _Call(msgspec.Struct, frozen=True):
    name: str
    arguments: Raw = msgspec.field(default_factory=Raw)
    parameters: Raw = msgspec.field(default_factory=Raw)
    """Llama's name for them."""


ONE_CALL = msgspec.json.Decoder(_Call)
CALLS = msgspec.json.Decoder(list[_Call])
ARGUMENTS = msgspec.json.Decoder(dict[str, Raw])


def _read_one(head: re.Match[str], text: str) -> list[FoundCall]:
    return [_found(ONE_CALL.decode(text))]


def _read_mistral(head: re.Match[str], text: str) -> list[FoundCall]:
    return read_calls(text) if head["array"] else [read_arguments(head["name"], text)]


def read_calls(text: str) -> list[FoundCall]:
    """Of a JSON list of them. Raises `msgspec.DecodeError`."""
    return [_found(call) for call in CALLS.decode(text)]


def _found(call: _Call) -> FoundCall:
    return read_arguments(call.name, (bytes(call.arguments) or bytes(call.parameters)).decode().strip())


def read_arguments(name: str, arguments: str) -> FoundCall:
    """Raises `msgspec.DecodeError` unless they are a JSON object and the name can be one."""
    if not FUNCTION_NAME.fullmatch(name):
        raise msgspec.ValidationError("no function has such a name")
    ARGUMENTS.decode(arguments)
    return FoundCall(name, arguments)


SYNTAXES = {
    ToolCallFormat.HERMES: CallSyntax("<tool_call>", re.compile(r"\s*"), _read_one, closing="</tool_call>"),
    ToolCallFormat.LLAMA3_JSON: CallSyntax(
        "<|python_tag|>", re.compile(r"\s*"), _read_one, may_begin_bare=True, between=" \t\r\n;"
    ),
    ToolCallFormat.MISTRAL: CallSyntax(
        "[TOOL_CALLS]",
        re.compile(r"\s*(?:(?P<array>\[\s*)|(?P<name>[a-zA-Z0-9_-]+)(?:\[CALL_ID\][a-zA-Z0-9]+)?(?:\[ARGS\])?\s*)"),
        _read_mistral,
    ),
}

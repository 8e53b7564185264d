"""The formats in which models write tool calls; the names are vLLM's."""

import re
from dataclasses import dataclass
from enum import StrEnum


class ToolCallFormat(StrEnum):
    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>` for each call; also used by Qwen up to 3
    and by Granite 4."""
    LLAMA3_JSON = "llama3_json"
    """`{"name": …, "parameters": {…}}` as the whole answer; several calls are separated by `;`."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or, in later models, `[TOOL_CALLS]name{…}` for each call."""
    QWEN3_CODER = "qwen3_coder"
    """`<tool_call><function=name><parameter=name>text</parameter>…</function></tool_call>` for each call; also used by
    Qwen 3.5 and later."""
    GLM45 = "glm45"
    """`<tool_call>name<arg_key>name</arg_key><arg_value>text</arg_value>…</tool_call>` for each call; GLM-4.5 and
    later."""
    LFM2 = "lfm2"
    """`<|tool_call_start|>[name(argument="text", …), …]<|tool_call_end|>`, as in Python."""
    OPENAI = "openai"
    """gpt-oss: messages to `functions.name`. They have no `CallSyntax`: `HarmonyReader` recognizes them."""


CALL_ALIASES = {"qwen3_xml": ToolCallFormat.QWEN3_CODER, "glm47": ToolCallFormat.GLM45}
"""vLLM's other names."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    opening: str
    """Starts calls, wherever it occurs."""
    head: re.Pattern[str] | None = None
    """For JSON: the text allowed between `opening` and the first brace. Group `array`: a list of calls starts there.
    Group `name`: the function's name; the brace then starts its arguments."""
    closing: str = ""
    """Follows a call; the end of the answer also ends it."""
    may_begin_bare: bool = False
    """As long as only calls were written, the brace alone also counts as an opening."""
    between: str = " \t\r\n"
    """Characters without meaning before, between and after calls."""


SYNTAXES = {
    ToolCallFormat.HERMES: CallSyntax("<tool_call>", re.compile(r"\s*"), closing="</tool_call>"),
    ToolCallFormat.LLAMA3_JSON: CallSyntax(
        "<|python_tag|>", re.compile(r"\s*"), may_begin_bare=True, between=" \t\r\n;"
    ),
    ToolCallFormat.MISTRAL: CallSyntax(
        "[TOOL_CALLS]",
        re.compile(r"\s*(?:(?P<array>\[\s*)|(?P<name>[a-zA-Z0-9_-]+)(?:\[CALL_ID\][a-zA-Z0-9]+)?(?:\[ARGS\])?\s*)"),
    ),
    ToolCallFormat.QWEN3_CODER: CallSyntax("<tool_call>", closing="</tool_call>"),
    ToolCallFormat.GLM45: CallSyntax("<tool_call>", closing="</tool_call>"),
    ToolCallFormat.LFM2: CallSyntax("<|tool_call_start|>", closing="<|tool_call_end|>"),
}
LIST_OF_CALLS = CallSyntax("", re.compile(r"\s*(?P<array>\[\s*)"))
"""`[{"name": …, "parameters": {…}}, …]` as the whole answer: models that must call tools are constrained to it."""

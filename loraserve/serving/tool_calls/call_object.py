"""A tool call as a JSON object: `{"name": …, "arguments": {…}}`, or with `"parameters"`, Llama's name for arguments."""

import re

import msgspec
from msgspec import Raw

from loraserve.serving.text.conversation import FUNCTION_NAME

MAX_BEGINNING = 512
"""Characters. If the arguments start later in an object, it is recognized as a call only once it is complete."""
BLANK = r"[ \t\r\n]*"
STRING = r'"[^"\\\x00-\x1f]*"'
NAME = rf'"name"{BLANK}:{BLANK}"(?P<name>[^"\\\x00-\x1f]*)"'
OTHER = rf'"(?!(?:name|arguments|parameters)")[^"\\\x00-\x1f]*"{BLANK}:{BLANK}{STRING}'
BEGINNING = re.compile(
    rf'\{{{BLANK}(?:(?:{NAME}|{OTHER}){BLANK},{BLANK})*+"(?:arguments|parameters)"{BLANK}:{BLANK}(?P<arguments>\{{)'
)


class _Call(msgspec.Struct, frozen=True):
    name: str
    arguments: Raw = msgspec.field(default_factory=Raw)
    parameters: Raw = msgspec.field(default_factory=Raw)


CALL = msgspec.json.Decoder(_Call)
ARGUMENTS = msgspec.json.Decoder(dict[str, Raw])


def read_beginning(text: str) -> tuple[str, int] | None:
    """The name and the start position of the arguments, once both have arrived. None = not yet, or not a call.

    Depends only on the first `MAX_BEGINNING` characters.
    """
    found = BEGINNING.match(text, 0, MAX_BEGINNING)
    if found is None or not FUNCTION_NAME.fullmatch(found["name"] or ""):
        return None
    return found["name"], found.start("arguments")


def read_complete(text: str) -> tuple[str, str] | None:
    """Name and arguments of a complete object, with its members in any order; None = not a call."""
    try:
        call = CALL.decode(text)
        arguments = (bytes(call.arguments) or bytes(call.parameters)).decode().strip()
        ARGUMENTS.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return (call.name, arguments) if FUNCTION_NAME.fullmatch(call.name) else None

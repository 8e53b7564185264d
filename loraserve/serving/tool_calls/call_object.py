"""A call as a JSON object: `{"name": …, "arguments": {…}}`, or `"parameters"`, which is Llama's name for them."""

import re

import msgspec
from msgspec import Raw

from loraserve.serving.text.conversation import FUNCTION_NAME

MAX_BEGINNING = 512
"""Characters. Of an object that has its arguments behind more than that it shows at its end only that it is a call."""
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
    """The name, and where the arguments begin, once both are there. None = not yet, or never.

    Depends on the first `MAX_BEGINNING` characters alone.
    """
    found = BEGINNING.match(text, 0, MAX_BEGINNING)
    if found is None or not FUNCTION_NAME.fullmatch(found["name"] or ""):
        return None
    return found["name"], found.start("arguments")


def read_whole(text: str) -> tuple[str, str] | None:
    """Name and arguments of a whole object, whatever the order of its members; None = it is no call."""
    try:
        call = CALL.decode(text)
        arguments = (bytes(call.arguments) or bytes(call.parameters)).decode().strip()
        ARGUMENTS.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return (call.name, arguments) if FUNCTION_NAME.fullmatch(call.name) else None

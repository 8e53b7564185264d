"""The parts of an answer with tool calls, in order."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallBegun:
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of the call that began last."""

    text: str


CallPart = CallBegun | CallArguments
Found = str | CallPart
"""A string is content."""


def content_joined(parts: Iterable[Found]) -> Iterator[Found]:
    """Joins consecutive content."""
    content: list[str] = []
    for part in parts:
        if isinstance(part, str):
            content.append(part)
            continue
        if content:
            yield "".join(content)
            content.clear()
        yield part
    if content:
        yield "".join(content)

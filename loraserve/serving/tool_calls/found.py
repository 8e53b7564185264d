"""What an answer with tool calls is made of, in its order."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallBegun:
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of the call that began last."""

    text: str


Found = str | CallBegun | CallArguments
"""A text is content."""

"""Adapts a conversation to gpt-oss's chat template, which drops or rejects much of what clients send."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from loraserve.serving.text.conversation import ChatMessage, JsonObject

_INSTRUCTIONS = frozenset({"system", "developer"})


def for_harmony(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Joins the leading instructions and turns later ones into user messages: the template drops all but the first.

    Splits messages with several calls into one per call, each followed by its result: the template shows only the first
    call of a message, and treats other text in that message as reasoning.
    """
    num_first = next((i for i, message in enumerate(messages) if message.role not in _INSTRUCTIONS), len(messages))
    first = "\n\n".join(message.content or "" for message in messages[:num_first])
    rest = [
        replace(message, role="user") if message.role in _INSTRUCTIONS else message for message in messages[num_first:]
    ]
    begin = [ChatMessage("developer", first)] if num_first else []
    return [*begin, *_with_one_call_each(rest)]


def described(tool: JsonObject) -> JsonObject:
    """Adds a description, which is optional in OpenAI's API but required by the template."""
    return tool | {"function": {"description": "", **tool["function"]}}


def _with_one_call_each(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    taken: set[int] = set()
    """Positions of results that were moved to their calls."""
    for index, message in enumerate(messages):
        if not message.tool_calls:
            if index not in taken:
                yield replace(message, content=message.content or "")
            continue
        thought = "\n".join(filter(None, (message.reasoning, message.content))) or None
        for number, call in enumerate(message.tool_calls):
            reasoning = thought if number == 0 else None
            yield replace(message, content="", reasoning=reasoning, tool_calls=(call,))
            results = range(index + 1, len(messages)) if len(message.tool_calls) > 1 else ()
            for place in results:
                if messages[place].role != "tool":
                    break
                if messages[place].tool_call_id == call.id:
                    taken.add(place)
                    yield messages[place]

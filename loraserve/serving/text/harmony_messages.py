"""A conversation as gpt-oss's chat template takes it, which drops or refuses much of what clients send."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from loraserve.serving.text.conversation import ChatMessage, JsonObject

_INSTRUCTIONS = frozenset({"system", "developer"})


def for_harmony(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Instructions first, as one message, and later ones as the user's: the template leaves out all but the first.

    One call in a message, with its result behind it: the template shows the first of a message, and takes what is said
    beside it for reasoning.
    """
    num_first = next((i for i, message in enumerate(messages) if message.role not in _INSTRUCTIONS), len(messages))
    first = "\n\n".join(message.content or "" for message in messages[:num_first])
    rest = [
        replace(message, role="user") if message.role in _INSTRUCTIONS else message for message in messages[num_first:]
    ]
    begin = [ChatMessage("developer", first)] if num_first else []
    return [*begin, *_with_one_call_each(rest)]


def described(tool: JsonObject) -> JsonObject:
    """The template asks for what OpenAI's API can do without."""
    return tool | {"function": {"description": "", **tool["function"]}}


def _with_one_call_each(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    taken: set[int] = set()
    """Results that were moved to their calls."""
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

"""What of a JSON schema costs more than its length says, and llguidance's own limits do not bound."""

from typing import Any

from loraserve.api.http.ranges import check_at_most
from loraserve.serving.settings import Limits

MOST_REMAINDERS = 2**63 - 1
"""More are counted as these: integers may be of thousands of digits."""


def check_cost(param: str, schema: dict[str, Any], limits: Limits) -> None:
    """Of one whose length was checked. Raises `ServingError`."""
    num_remainders = 0
    left: list[Any] = [schema]
    while left:
        match left.pop():
            case dict() as node:
                num_remainders += _num_remainders(node.get("multipleOf"))
                left += node.values()
            case list() as nodes:
                left += nodes
            case str() as text:
                # A text that can only come next is tokenised at once: 2 µs a character.
                check_at_most(param, len(text), limits.max_grammar_chars, "characters in one text")
    check_at_most(param, num_remainders, limits.max_multiple_of, "remainders of 'multipleOf'")


def _num_remainders(multiple: Any) -> int:
    """As many states are made: a million take 7 s. Fractions and zeros at the end cost nothing."""
    if not isinstance(multiple, int | float) or multiple != multiple // 1:
        return 0
    remainders = min(abs(int(multiple)), MOST_REMAINDERS)
    while remainders and remainders % 10 == 0:
        remainders //= 10
    return remainders

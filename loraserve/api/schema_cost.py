"""What of a JSON schema costs more than its length says, and llguidance's own limits do not bound."""

from typing import Any

from loraserve.api.ranges import check_at_most
from loraserve.serving.errors import invalid_value
from loraserve.serving.settings import Limits


def check_cost(param: str, schema: dict[str, Any], limits: Limits) -> None:
    """Raises `ServingError`."""
    sum_of_multiples = 0
    left: list[Any] = [schema]
    while left:
        match left.pop():
            case dict() as node:
                sum_of_multiples += _cost_of_multiple(node.get("multipleOf"))
                left += node.values()
            case list() as nodes:
                left += nodes
            case str() as text:
                # A text that can only come next is tokenised at once: 2 us a character.
                check_at_most(param, len(text), limits.max_grammar_chars, "characters in one text")
    if sum_of_multiples > limits.max_multiple_of:
        message = f"has a 'multipleOf' that is too large; the limit of all together is {limits.max_multiple_of}."
        raise invalid_value(param, message)


def _cost_of_multiple(multiple: Any) -> int:
    """As many states as it has remainders: a million take 7 s to make. Fractions and zeros at the end cost nothing."""
    if not isinstance(multiple, int | float) or multiple != multiple // 1:
        return 0
    remainders = abs(int(multiple))
    while remainders and remainders % 10 == 0:
        remainders //= 10
    return remainders

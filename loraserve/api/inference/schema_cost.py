"""Bounds parts of a JSON schema that cost more than their length suggests and that llguidance does not limit."""

from typing import Any

from loraserve.api.http.ranges import check_at_most
from loraserve.serving.settings import RequestLimits

MOST_REMAINDERS = 2**63 - 1
"""Higher numbers count as this one: an integer may have thousands of digits."""


def check_cost(param: str, schema: dict[str, Any], limits: RequestLimits) -> None:
    """For a schema whose length was checked. Raises `ServingError`."""
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
                # If only this text can come next, it is tokenized at once, which takes 2 µs per character.
                check_at_most(param, len(text), limits.max_grammar_chars, "characters in one string")
    check_at_most(param, num_remainders, limits.max_multiple_of, "possible remainders of 'multipleOf'")


def _num_remainders(multiple: Any) -> int:
    """Number of states that llguidance creates; a million take 7 s. Fractions and trailing zeros cost nothing."""
    if not isinstance(multiple, int | float) or multiple != multiple // 1:
        return 0
    remainders = min(abs(int(multiple)), MOST_REMAINDERS)
    while remainders and remainders % 10 == 0:
        remainders //= 10
    return remainders

"""Range checks whose messages carry the parameter, the value and the limit."""

from collections.abc import Collection

from loraserve.api.http.quoting import beginning
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value

INT32, INT64 = 2**31, 2**63


def check_range(param: str, value: float, low: float, high: float) -> None:
    """Both ends are allowed; NaN never is."""
    if not low <= value <= high:
        raise invalid_value(param, f"is {_shown(value)}; it must be between {_shown(low)} and {_shown(high)}.")


def check_at_most(param: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise invalid_value(param, f"has {count} {what}; the limit is {limit}.")


def check_one_of(param: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        choices = " or ".join(f"'{each}'" for each in allowed)
        raise invalid_value(param, f"is {beginning(value)!r}; it must be {choices}.")


def check_token_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """NOTE: these ids index tensors in the engine, so none may pass unchecked."""
    if not token_ids:
        return
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise invalid_value(param, f"contains token id {_shown(wrong)}; ids must be between 0 and {vocab_size - 1}.")


def unsupported(param: str, message: str) -> ServingError:
    return ServingError(ErrorCode.UNSUPPORTED_PARAMETER, f"'{param}' {message}", param=param)


def _shown(number: float) -> str:
    """Short for any number that a client may send: Python refuses to print huge integers."""
    if isinstance(number, int) and abs(number) >= 2**64:
        return "beyond 64 bits"
    return str(number).removesuffix(".0")

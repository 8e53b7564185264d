"""Parsers for the values that fields of `adapter_config.json` may have. Each takes a field's name and its value."""

import re
import unicodedata
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from loraserve_adapters.errors import AdapterError, shown, shown_name
from loraserve_adapters.limits import AdapterLimits

CONFIG_NAME = "adapter_config.json"
SEQ_CLS = "SEQ_CLS"
HEAD = "score"
"""transformers' name for the head of a `…ForSequenceClassification` with a decoder."""
SAVED_WITH_HEAD = ("classifier", HEAD)
"""Modules that PEFT lists if it saves the head, whichever of the two the model has."""
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")
"""As in transformers' configs."""
TEMPLATE_NAME_RULE = "1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PLACEHOLDERS = ("{query}", "{document}")
"""Of a `score_template`."""
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction in which text is shown."""
_SPACES = {ord(character): " " for character in "\n\r\t"}

T = TypeVar("T")


def check_type(name: str, value: Any, types: tuple[type, ...]) -> None:
    if value is not None and type(value) not in types:
        raise invalid(name, value, " or ".join(accepted.__name__ for accepted in types) + " or null")


def _rank(name: str, value: Any, limits: AdapterLimits) -> int:
    if type(value) is not int or value < 1:
        raise invalid(name, value, "a positive integer")
    if value > limits.max_lora_rank:
        raise refused(
            "rank_too_large",
            f"found {shown(value)}; at most {limits.max_lora_rank} is accepted",
            name,
            found=shown(value),
            expected=f"at most {limits.max_lora_rank}",
        )
    return value


def rank_of(limits: AdapterLimits) -> Callable[[str, Any], int]:
    return lambda name, value: _rank(name, value, limits)


def alpha(name: str, value: Any) -> float:
    # Far above 1e30, the scaling would overflow float32.
    if type(value) not in (int, float) or not abs(value) <= 1e30:
        raise invalid(name, value, "a finite number")
    return float(value)


def flag(name: str, value: Any) -> bool:
    if value is not None and type(value) is not bool:
        raise invalid(name, value, "true or false")
    return bool(value)


def targets_of(limits: AdapterLimits, *, may_be_empty: bool) -> Callable[[str, Any], tuple[str, ...] | str]:
    def parse(name: str, value: Any) -> tuple[str, ...] | str:
        if may_be_empty and value in (None, []):
            return ()
        if value == []:
            raise invalid(name, value, "at least one module")
        return names(name, value, limits)

    return parse


def parameters_of(limits: AdapterLimits) -> Callable[[str, Any], tuple[str, ...]]:
    def parse(name: str, value: Any) -> tuple[str, ...]:
        parsed = names(name, [] if value is None else value, limits)
        if isinstance(parsed, str):
            raise invalid(name, value, "a list of names")
        return parsed

    return parse


def names(name: str, value: Any, limits: AdapterLimits) -> tuple[str, ...] | str:
    """Lists are sets in PEFT, so they come back sorted and without repeats."""
    if isinstance(value, str):
        return _checked_length(name, value, limits)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise invalid(name, value, "a list of names or a pattern")
    return tuple(sorted({_checked_length(name, item, limits) for item in value}))


def _checked_length(name: str, pattern: str, limits: AdapterLimits) -> str:
    if len(pattern) > limits.max_pattern_length:
        raise refused(
            "too_large",
            f"a pattern of {len(pattern)} characters; at most {limits.max_pattern_length} are accepted",
            name,
            found=f"{len(pattern)} characters",
            expected=f"at most {limits.max_pattern_length}",
        )
    return pattern


def layers(name: str, value: Any) -> tuple[int, ...]:
    numbers = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(number) is int and 0 <= number < 1_000_000 for number in numbers):
        raise invalid(name, value, "layer numbers")
    return tuple(sorted(set(numbers)))


def invocation_of(limits: AdapterLimits) -> Callable[[str, Any], tuple[int, ...]]:
    def parse(name: str, value: Any) -> tuple[int, ...]:
        if value is None:
            return ()
        is_list = isinstance(value, list) and len(value) > 0
        if not is_list or not all(type(token_id) is int and 0 <= token_id < 1 << 31 for token_id in value):
            raise invalid(name, value, "null or a list of token ids")
        if len(value) > limits.max_invocation_tokens:
            found, expected = f"{len(value)} tokens", f"at most {limits.max_invocation_tokens}"
            raise refused("too_large", f"{found}; {expected} are accepted", name, found=found, expected=expected)
        return tuple(value)

    return parse


def trained_tokens_of(limits: AdapterLimits) -> Callable[[str, Any], tuple[tuple[str, tuple[int, ...]], ...]]:
    """(table, ids) pairs, sorted by the tables' names; the name is "" for a bare list, which means the embedding."""

    def parse(name: str, value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
        tables = {"": value} if isinstance(value, list) else {} if value is None else value
        if not isinstance(tables, dict) or (isinstance(value, dict) and "" in value):
            raise invalid(name, value, "null, a list of token ids, or an object with such a list for each table")
        found = (
            (_checked_length(name, table, limits), _token_ids(f"{name}.{table}" if table else name, ids, limits))
            for table, ids in tables.items()
        )
        return tuple(sorted(found))

    return parse


def _token_ids(name: str, value: Any, limits: AdapterLimits) -> tuple[int, ...]:
    is_list = isinstance(value, list) and len(value) > 0
    if not is_list or not all(type(token_id) is int and 0 <= token_id < 1 << 31 for token_id in value):
        raise invalid(name, value, "a list of token ids")
    max_tokens = min(limits.max_trained_tokens, limits.max_lora_rank)
    if len(value) > max_tokens:
        found, expected = f"{len(value)} tokens", f"at most {max_tokens}"
        raise refused("too_large", f"{found}; {expected} are accepted", name, found=found, expected=expected)
    if repeated := [token_id for token_id in {*value} if value.count(token_id) > 1]:
        found = shown(min(repeated))
        raise refused(
            "invalid_field", f"token id {found} is listed more than once", name, found=found, expected="each id once"
        )
    return tuple(value)


class SavedModules(NamedTuple):
    """Those of `modules_to_save`."""

    has_head: bool
    """Whether it is a classifier's, which has a head of its own."""
    tables: tuple[str, ...]
    """All others, sorted: ends of names."""


def saved_modules_of(limits: AdapterLimits, task_type: Any) -> Callable[[str, Any], SavedModules]:
    def parse(name: str, value: Any) -> SavedModules:
        saved = [] if value is None else value
        if not isinstance(saved, list) or not all(isinstance(item, str) and item for item in saved):
            raise invalid(name, value, "null or a list of names")
        has_head = task_type == SEQ_CLS or (task_type is None and HEAD in saved)
        if HEAD in saved and not has_head:
            reason = f"the head of a classifier needs a task_type of {SEQ_CLS}"
            raise unsupported(name, saved, [item for item in saved if item != HEAD], reason)
        others = {_checked_length(name, item, limits) for item in saved}.difference(SAVED_WITH_HEAD if has_head else ())
        if len(others) > limits.max_own_tables:
            found, expected = f"{len(others)} names", f"at most {limits.max_own_tables}"
            raise refused("too_large", f"{found}; {expected} are accepted", name, found=found, expected=expected)
        return SavedModules(has_head, tuple(sorted(others)))

    return parse


def labels_of(limits: AdapterLimits) -> Callable[[str, Any], tuple[str, ...]]:
    def parse(name: str, value: Any) -> tuple[str, ...]:
        if value is None or value == {}:
            return ()
        given = value if isinstance(value, dict) else {}
        labels = [label for index in range(len(given)) if isinstance(label := given.get(str(index)), str)]
        if not labels or len(labels) < len(given):
            raise invalid(name, value, 'the names of all labels by number, such as {"0": …, "1": …}')
        for label in labels:
            _check_label(name, label, limits)
        num_bytes = sum(len(label.encode()) for label in labels)
        if num_bytes > limits.max_labels_bytes:
            found, expected = f"{num_bytes} bytes", f"at most {limits.max_labels_bytes}"
            reason = f"names of {found} in total; {expected} are accepted"
            raise refused("too_large", reason, name, found=found, expected=expected)
        return tuple(labels)

    return parse


def _check_label(name: str, label: str, limits: AdapterLimits) -> None:
    num_bytes = len(label.encode())
    if not 1 <= num_bytes <= limits.max_label_bytes:
        found, expected = f"{shown(label)} of {num_bytes} bytes", f"1 to {limits.max_label_bytes}"
        raise refused("invalid_field", f"{found}; {expected} are accepted", name, found=found, expected=expected)
    _check_shows(name, label)


def _check_shows(name: str, text: str) -> None:
    if any(unicodedata.category(character) == "Cc" or character in _DIRECTIONS for character in text):
        reason = f"{shown(text)} has control characters or characters that change the text direction"
        raise refused("invalid_field", reason, name, found=shown(text), expected="text without such characters")


def problem_type(name: str, value: Any) -> str | None:
    if value is not None and value not in PROBLEM_TYPES:
        raise invalid(name, value, f"null or one of {', '.join(PROBLEM_TYPES)}")
    return value


def score_template_of(limits: AdapterLimits) -> Callable[[str, Any], str | None]:
    def parse(name: str, value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str) or any(value.count(placeholder) != 1 for placeholder in PLACEHOLDERS):
            raise invalid(name, value, f"null or a text that contains {' and '.join(PLACEHOLDERS)} exactly once each")
        num_bytes = len(value.encode())
        if num_bytes > limits.max_score_template_bytes:
            found, expected = f"{num_bytes} bytes", f"at most {limits.max_score_template_bytes}"
            raise refused("too_large", f"{found}; {expected} are accepted", name, found=found, expected=expected)
        _check_shows(name, value.translate(_SPACES))
        return value

    return parse


def chat_template(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not is_template_name(value):
        raise invalid(name, value, f"null or the name of one of the server's chat templates: {TEMPLATE_NAME_RULE}")
    return value


def is_template_name(text: str) -> bool:
    return _TEMPLATE_NAME.fullmatch(text) is not None


def layers_pattern_of(limits: AdapterLimits) -> Callable[[str, Any], tuple[str, ...]]:
    def parse(name: str, value: Any) -> tuple[str, ...]:
        patterns = [] if value is None or value == "" else [value] if isinstance(value, str) else value
        if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
            raise invalid(name, value, "names such as layers")
        return tuple(_checked_length(name, item, limits) for item in patterns)

    return parse


def table_of(
    limits: AdapterLimits, parse_value: Callable[[str, Any], T]
) -> Callable[[str, Any], tuple[tuple[str, T], ...]]:
    def parse(name: str, value: Any) -> tuple[tuple[str, T], ...]:
        if value is None:
            return ()
        if not isinstance(value, dict):
            raise invalid(name, value, "an object")
        return tuple(
            (_checked_length(name, pattern, limits), parse_value(f"{name}.{pattern}", item))
            for pattern, item in value.items()
        )

    return parse


def invalid(name: str, value: Any, expected: str) -> AdapterError:
    reason = f"found {shown(value)}, expected {expected}"
    return refused("invalid_field", reason, name, found=shown(value), expected=expected)


def unsupported(name: str, value: Any, expected: Any, why: str) -> AdapterError:
    reason = f"found {shown(value)}, expected {shown(expected)}: {why}"
    return refused("unsupported_option", reason, name, found=shown(value), expected=shown(expected))


def refused(
    code: str,
    reason: str,
    field: str | None = None,
    *,
    found: str | None = None,
    expected: str | None = None,
    remedy: str | None = None,
) -> AdapterError:
    where = CONFIG_NAME if field is None else f"{CONFIG_NAME}: {shown_name(field)}"
    return AdapterError(
        code,
        f"{where}: {reason}",
        file=CONFIG_NAME,
        key=field,
        found=found,
        expected=expected,
        remedy=remedy,
    )

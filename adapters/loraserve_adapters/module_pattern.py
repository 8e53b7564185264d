"""Matches tenants' regular expressions against module names in bounded time, without the `re` engine.

`re` backtracks: `(a+)+b` takes exponential time on a name it does not match. Here a pattern is parsed by `re`'s own
parser, so it means what it means in PEFT, and evaluated from its end to its start on *sets* of positions, held as the
bits of an int: each node maps the positions where it may end to those where it may start. No path is walked twice.
Accepted: literals, `.`, classes, groups, alternatives, greedy and lazy repeats, anchors, `\\b`, lookahead. Refused by
name: backreferences, lookbehind, conditionals, atomic groups, possessive repeats and flags.
"""

import functools
import re
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from loraserve_adapters.config import CONFIG_NAME
from loraserve_adapters.errors import AdapterError, shown

# Imported by name, because the standard library's type stubs lack them.
sre = import_module("re._constants")
sre_parser = import_module("re._parser")

_MAX_GROUP_DEPTH = 40


class OutOfSteps(Exception):
    """The budget is used up; `ModulePattern` turns it into a refusal of its field."""


class StepBudget:
    """Work left for all patterns of one adapter."""

    def __init__(self, num_steps: int) -> None:
        self._num_left = num_steps

    def spend(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise OutOfSteps


class Subject:
    """A module name (not empty, no line breaks), prepared for matching.

    Position i is before character i; bit i of a set of positions stands for it.
    """

    def __init__(self, name: str, budget: StepBudget) -> None:
        self.name = name
        self.end = 1 << len(name)
        self.all_positions = (self.end << 1) - 1
        self.spend = budget.spend
        self._where: dict[str, int] = {}
        self._where_any: dict[Callable[[str], bool], int] = {}
        for index, character in enumerate(name):
            self._where[character] = self._where.get(character, 0) | 1 << index
        in_word = sum(1 << index for index, character in enumerate(name) if _is_word(character))
        self.boundaries = (in_word ^ (in_word << 1)) & self.all_positions

    def where(self, character: str) -> int:
        return self._where.get(character, 0)

    def where_any(self, accepts: Callable[[str], bool]) -> int:
        known = self._where_any.get(accepts)
        if known is None:
            known = sum(positions for character, positions in self._where.items() if accepts(character))
            self._where_any[accepts] = known
        return known


Node = Callable[[Subject, int], int]
"""(subject, set of positions where the node may end) → set of positions where it may start."""


class ModulePattern:
    """A compiled pattern. `source` is the whole expression, `field` the config's field, for errors."""

    def __init__(self, source: str, field: str) -> None:
        self._source = source
        self._field = field
        self._node = _compile(source, field)

    def matches_fully(self, subject: Subject) -> bool:
        """As `re.fullmatch(source, name)`."""
        return bool(self._starts(subject, subject.end) & 1)

    def matches_start(self, subject: Subject) -> bool:
        """As `re.match(source, name)`."""
        return bool(self._starts(subject, subject.all_positions) & 1)

    def _starts(self, subject: Subject, ends: int) -> int:
        try:
            return self._node(subject, ends)
        except OutOfSteps:
            raise _refused(
                "pattern_too_complex", self._field, self._source, "takes too long to match; use a simpler one"
            ) from None


def _compile(source: str, field: str) -> Node:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = sre_parser.parse(source)
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        reason = error.msg if isinstance(error, re.error) else type(error).__name__
        raise _refused("bad_pattern", field, source, reason) from None
    if tree.state.flags & ~re.UNICODE.value:
        raise _unsupported(field, source, "flags such as (?i)")
    return _Compiler(source, field).sequence(tree, 0)


def _unsupported(field: str, source: str, what: str) -> AdapterError:
    return _refused("unsupported_pattern", field, source, f"{what} are not supported")


def _refused(code: str, field: str, source: str, reason: str) -> AdapterError:
    message = f"{CONFIG_NAME}: {field}: {shown(source)}: {reason}"
    return AdapterError(code, message, file=CONFIG_NAME, key=field, found=shown(source))


class _Compiler:
    def __init__(self, source: str, field: str) -> None:
        self._source = source
        self._field = field

    def sequence(self, items: Iterable[tuple[Any, Any]], depth: int) -> Node:
        if depth > _MAX_GROUP_DEPTH:
            raise _unsupported(self._field, self._source, f"groups nested deeper than {_MAX_GROUP_DEPTH}")
        nodes = [self._node(operator, argument, depth) for operator, argument in items]
        nodes.reverse()

        def before(subject: Subject, ends: int) -> int:
            subject.spend()
            for node in nodes:
                if not ends:
                    return 0
                subject.spend()
                ends = node(subject, ends)
            return ends

        return before

    def _node(self, operator: Any, argument: Any, depth: int) -> Node:
        if operator is sre.SUBPATTERN:
            _, added_flags, removed_flags, items = argument
            if added_flags or removed_flags:
                raise _unsupported(self._field, self._source, "flags such as (?i:…)")
            return self.sequence(items, depth + 1)
        if operator is sre.BRANCH:
            return _any_of([self.sequence(items, depth + 1) for items in argument[1]])
        if operator in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            # Greedy or lazy changes which match is found, never whether there is one.
            least, most, items = argument
            if least == 0 and most is sre.MAXREPEAT and len(items) == 1 and items[0][0] is sre.ANY:
                return _anything
            return _repeated(self.sequence(items, depth + 1), int(least), int(most))
        if operator in (sre.ASSERT, sre.ASSERT_NOT):
            direction, items = argument
            if direction < 0:
                raise _unsupported(self._field, self._source, "lookbehinds")
            return _lookahead(self.sequence(items, depth + 1), negated=operator is sre.ASSERT_NOT)
        if operator is sre.AT:
            return _anchor(argument)
        if operator is sre.FAILURE:
            return lambda subject, ends: 0
        return self._character(operator, argument)

    def _character(self, operator: Any, argument: Any) -> Node:
        if operator is sre.LITERAL:
            literal = chr(argument)
            return lambda subject, ends: ends >> 1 & subject.where(literal)
        accepts = _character_test(operator, argument)
        if accepts is None:
            raise _unsupported(self._field, self._source, f"constructs like {str(operator).lower()}")
        # Cached: a class of 500 characters is evaluated only once for each character that occurs in names.
        accepts = functools.cache(accepts)
        return lambda subject, ends: ends >> 1 & subject.where_any(accepts)


def _anything(subject: Subject, ends: int) -> int:
    """`.*`: everything up to the last end, because names have no line breaks."""
    return (1 << ends.bit_length()) - 1


def _any_of(nodes: list[Node]) -> Node:
    def before(subject: Subject, ends: int) -> int:
        starts = 0
        for node in nodes:
            starts |= node(subject, ends)
        return starts

    return before


def _repeated(node: Node, least: int, most: int) -> Node:
    def before(subject: Subject, ends: int) -> int:
        for _ in range(least):
            earlier = node(subject, ends)
            if earlier == ends:
                break
            ends = earlier
            if not ends:
                return 0
        starts = fresh = ends
        for _ in range(most - least):
            fresh = node(subject, fresh) & ~starts
            if not fresh:
                break
            starts |= fresh
        return starts

    return before


def _lookahead(node: Node, *, negated: bool) -> Node:
    def before(subject: Subject, ends: int) -> int:
        possible = node(subject, subject.all_positions)
        return ends & ~possible if negated else ends & possible

    return before


def _anchor(kind: Any) -> Node:
    if kind in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        return lambda subject, ends: ends & 1
    if kind in (sre.AT_END, sre.AT_END_STRING):
        return lambda subject, ends: ends & subject.end
    if kind is sre.AT_BOUNDARY:
        return lambda subject, ends: ends & subject.boundaries
    return lambda subject, ends: ends & ~subject.boundaries


def _character_test(operator: Any, argument: Any) -> Callable[[str], bool] | None:
    if operator is sre.ANY:
        return lambda character: character != "\n"
    if operator is sre.LITERAL:
        return lambda character: ord(character) == argument
    if operator is sre.NOT_LITERAL:
        return lambda character: ord(character) != argument
    if operator is sre.RANGE:
        return lambda character: argument[0] <= ord(character) <= argument[1]
    if operator is sre.CATEGORY:
        return _CATEGORIES.get(argument)
    if operator is not sre.IN:
        return None
    negated = argument[0][0] is sre.NEGATE
    tests = [_character_test(*item) for item in (argument[1:] if negated else argument)]
    known = [test for test in tests if test is not None]
    if len(known) != len(tests):
        return None
    return lambda character: any(test(character) for test in known) != negated


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    sre.CATEGORY_WORD: _is_word,
    sre.CATEGORY_NOT_WORD: lambda character: not _is_word(character),
}

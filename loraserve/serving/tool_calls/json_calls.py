"""Finds tool calls that are JSON: `{"name": …, "arguments": {…}}`, alone or in a list, or a name and then arguments."""

from enum import Enum, auto

from loraserve.serving.text.conversation import FUNCTION_NAME
from loraserve.serving.text.found import CallBegun
from loraserve.serving.text.stop_strings import overlap
from loraserve.serving.tool_calls.around import MAX_AROUND, AroundCalls, State
from loraserve.serving.tool_calls.call_object import MAX_BEGINNING, read_beginning, read_complete
from loraserve.serving.tool_calls.formats import CallSyntax
from loraserve.serving.tool_calls.json_extent import Extent, JsonExtent

SEPARATORS = " \t\r\n,"
"""Between the calls of a list."""


class _Within(Enum):
    """Where in a call, or a list of calls."""

    OBJECT = auto()
    """In an object that may be a call."""
    ARGUMENTS = auto()
    BROKEN = auto()
    """In arguments that are not JSON."""
    REST = auto()
    """In a call's object, after its arguments."""
    LIST = auto()
    """Between the objects of a list."""


class JsonCallParser(AroundCalls):
    """See `CallParser`.

    Something counts as a call once its name has arrived and its arguments begin. From then on the arguments are emitted
    as they arrive, exactly as the model wrote them, even if they are cut off or not JSON.
    """

    def __init__(self, syntax: CallSyntax) -> None:
        super().__init__(syntax)
        assert syntax.head is not None
        self._head = syntax.head
        self._within = _Within.OBJECT
        self._num_before_object = 0
        """Number of pieces in `_held` before the object."""
        self._beginning = ""
        """The object's first characters."""
        self._extent = JsonExtent()
        """Extent of the object, of its arguments, or of the text after them."""
        self._is_in_object = False
        """Whether the arguments are a member of an object; otherwise they stand alone."""
        self._is_in_list = False

    @property
    def arguments(self) -> Extent | None:
        """See `CallParser`."""
        is_in_arguments = self._state is State.CALL and self._within in (_Within.ARGUMENTS, _Within.BROKEN)
        return self._extent.state if is_in_arguments else None

    def _finish_call(self) -> None:
        match self._within:
            case _Within.BROKEN:
                self._add_arguments(self._text)
            case _Within.LIST | _Within.REST if not "".join(self._held).strip(SEPARATORS):
                self._end_call()
            case _:
                self._release(self._text)

    def _read_call(self) -> bool:
        match self._within:
            case _Within.OBJECT:
                return self._read_object()
            case _Within.ARGUMENTS:
                return self._read_arguments()
            case _Within.BROKEN:
                return self._read_broken()
            case _Within.REST:
                return self._read_rest()
            case _Within.LIST:
                return self._read_list()

    def _enter(self, within: _Within) -> None:
        self._state, self._within = State.CALL, within

    def _read_head(self) -> bool:
        brace = self._text.find("{", 0, MAX_AROUND)
        if brace < 0 and len(self._text) < MAX_AROUND:
            return False
        head = self._head.fullmatch(self._text, 0, max(brace, 0))
        if brace < 0 or head is None:
            self._release()
            return True
        groups = head.groupdict()
        self._hold(brace)
        self._is_in_list = groups.get("array") is not None
        self._is_in_object = groups.get("name") is None
        if self._is_in_object:
            self._begin_object()
        elif FUNCTION_NAME.fullmatch(groups["name"]):
            self._begin_call(groups["name"])
        else:
            self._release()
        return True

    def _begin_object(self) -> None:
        self._num_before_object, self._beginning, self._extent = len(self._held), "", JsonExtent()
        self._enter(_Within.OBJECT)

    def _read_object(self) -> bool:
        length = self._extent.feed(self._text)
        if len(self._beginning) < MAX_BEGINNING:
            self._beginning += self._text[: min(length, MAX_BEGINNING - len(self._beginning))]
            begun = read_beginning(self._beginning)
        else:
            begun = None
        self._hold(length)
        if begun is not None:
            name, start = begun
            self._text = self._object()[start:] + self._text
            self._begin_call(name)
            return True
        match self._extent.state:
            case Extent.OPEN:
                return False
            case Extent.BROKEN:
                self._release()
            case Extent.CLOSED:
                self._end_object()
        return True

    def _object(self) -> str:
        return "".join(self._held[self._num_before_object :])

    def _end_object(self) -> None:
        """Ends an object that was not recognized as a call by its beginning."""
        found = read_complete(self._object())
        if found is None:
            self._release()
            return
        name, arguments = found
        self._begin_call(name)
        self._add_arguments(arguments)
        self._end_call_object()

    def _begin_call(self, name: str) -> None:
        """The arguments follow."""
        self._held.clear()
        self._found.append(CallBegun(name))
        self._has_called = True
        self._extent = JsonExtent()
        self._enter(_Within.ARGUMENTS)

    def _read_arguments(self) -> bool:
        self._add_arguments(self._cut(self._extent.feed(self._text)))
        match self._extent.state:
            case Extent.OPEN:
                return False
            case Extent.BROKEN:
                self._enter(_Within.BROKEN)
            case Extent.CLOSED if self._is_in_object:
                self._extent = JsonExtent(depth=1)
                self._enter(_Within.REST)
            case Extent.CLOSED:
                self._end_call()
        return True

    def _read_broken(self) -> bool:
        """Reads up to a mark that ends or begins a call."""
        marks = [mark for mark in (self._syntax.closing, self._syntax.opening) if mark]
        starts = [start for mark in marks if (start := self._text.find(mark)) >= 0]
        if not starts:
            num_held = max((overlap(self._text, mark) for mark in marks), default=0)
            self._add_arguments(self._cut(len(self._text) - num_held))
            return False
        self._add_arguments(self._cut(min(starts)))
        self._is_in_list = False
        self._end_call_object()
        return True

    def _read_rest(self) -> bool:
        self._hold(self._extent.feed(self._text))
        match self._extent.state:
            case Extent.OPEN:
                return False
            case Extent.BROKEN if "".join(self._held).strip():
                self._release()
            case _:
                self._held.clear()
                self._end_call_object()
        return True

    def _end_call_object(self) -> None:
        if self._is_in_list:
            self._enter(_Within.LIST)
        elif self._syntax.closing:
            self._state = State.CLOSING
        else:
            self._end_call()

    def _read_list(self) -> bool:
        self._hold(len(self._text) - len(self._text.lstrip(SEPARATORS)))
        match self._text[:1]:
            case "":
                return False
            case "{":
                self._begin_object()
            case "]":
                self._cut(1)
                self._end_call()
            case _:
                self._release()
        return True

"""Finds tool calls in an answer that arrives in pieces, and holds back text that may turn out to be one."""

from enum import Enum, auto

from loraserve.serving.text.conversation import FUNCTION_NAME
from loraserve.serving.text.found import CallArguments, CallBegun, Found, content_joined
from loraserve.serving.text.stop_strings import overlap
from loraserve.serving.tool_calls.call_object import MAX_BEGINNING, read_beginning, read_complete
from loraserve.serving.tool_calls.formats import CallSyntax
from loraserve.serving.tool_calls.json_extent import Extent, JsonExtent

MAX_AROUND = 128
"""Maximum number of characters between an opening and its JSON, and between the JSON and its closing."""
SEPARATORS = " \t\r\n,"
"""Between the calls of a list."""
PIECE = 1024
"""Characters processed at once: the remainder is copied for each mark found, and an answer may be a megabyte of marks,
which took 14 s as a single piece."""


class _State(Enum):
    CONTENT = auto()
    """Before an opening."""
    HEAD = auto()
    OBJECT = auto()
    """In an object that may be a call."""
    ARGUMENTS = auto()
    BROKEN = auto()
    """In arguments that are not JSON."""
    REST = auto()
    """In a call's object, after its arguments."""
    LIST = auto()
    """Between the objects of a list."""
    CLOSING = auto()


class ToolCallParser:
    """The outcome depends only on the text, not on how it was cut into pieces.

    Something counts as a call once its name has arrived and its arguments begin. From then on the arguments are emitted
    as they arrive, exactly as the model wrote them, even if they are cut off or not JSON. Everything else is content.
    Only the syntax around names and arguments is lost, and white space if the answer consists only of calls.
    """

    def __init__(self, syntax: CallSyntax) -> None:
        self._syntax = syntax
        self._state = _State.CONTENT
        self._text = ""
        """Not processed yet, or too short to decide."""
        self._held: list[str] = []
        """Text before `_text`: content, unless it belongs to a call."""
        self._num_before_object = 0
        """Number of pieces in `_held` before the object."""
        self._beginning = ""
        """The object's first characters."""
        self._extent = JsonExtent()
        """Extent of the object, of its arguments, or of the text after them."""
        self._is_in_object = False
        """Whether the arguments are a member of an object; otherwise they stand alone."""
        self._is_in_list = False
        self._only_calls = True
        """Whether there was no content yet, or none since the last call."""
        self._found: list[Found] = []
        self._has_called = False

    def feed(self, text: str) -> list[Found]:
        """The content and call parts that became certain, in order."""
        for start in range(0, len(text), PIECE):
            self._text += text[start : start + PIECE]
            while self._advance():
                pass
        return self._taken()

    def finish(self) -> list[Found]:
        """The rest, after the last text."""
        match self._state:
            case _State.BROKEN:
                self._add_arguments(self._text)
            case _State.CLOSING if self._syntax.closing.startswith(self._text.strip()):
                self._end_call()
            case _State.LIST | _State.REST if not "".join(self._held).strip(SEPARATORS):
                self._end_call()
            case _State.CONTENT if self._has_called and not self._text:
                pass
            case _:
                self._release(self._text)
        self._text = ""
        return self._taken()

    @property
    def arguments(self) -> Extent | None:
        """State of the arguments being read, open or broken; None = none are. Query it before `finish`."""
        return self._extent.state if self._state in (_State.ARGUMENTS, _State.BROKEN) else None

    def _taken(self) -> list[Found]:
        taken = [*content_joined(self._found)]
        self._found.clear()
        return taken

    def _advance(self) -> bool:
        """False if more text is needed."""
        match self._state:
            case _State.CONTENT:
                return self._seek_opening()
            case _State.HEAD:
                return self._read_head()
            case _State.OBJECT:
                return self._read_object()
            case _State.ARGUMENTS:
                return self._read_arguments()
            case _State.BROKEN:
                return self._read_broken()
            case _State.REST:
                return self._read_rest()
            case _State.LIST:
                return self._read_list()
            case _State.CLOSING:
                return self._read_closing()

    def _seek_opening(self) -> bool:
        opening = self._syntax.opening
        if self._only_calls:
            self._hold(len(self._text) - len(self._text.lstrip(self._syntax.between)))
            if not self._text or (len(self._text) < len(opening) and opening.startswith(self._text)):
                return False
            if self._syntax.may_begin_bare and self._text.startswith("{"):
                self._state = _State.HEAD
                return True
            if not self._text.startswith(opening):
                self._release()
        # An empty opening matches only at the beginning of the answer.
        start = self._text.find(opening) if opening or self._only_calls else -1
        if start < 0:
            self._release(self._cut(len(self._text) - overlap(self._text, opening)))
            return False
        if start > 0:
            self._release(self._cut(start))
        self._hold(len(opening))
        self._state = _State.HEAD
        return True

    def _read_head(self) -> bool:
        brace = self._text.find("{", 0, MAX_AROUND)
        if brace < 0 and len(self._text) < MAX_AROUND:
            return False
        head = self._syntax.head.fullmatch(self._text, 0, max(brace, 0))
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
        self._state = _State.OBJECT

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
        self._state = _State.ARGUMENTS

    def _add_arguments(self, arguments: str) -> None:
        if arguments:
            self._found.append(CallArguments(arguments))

    def _read_arguments(self) -> bool:
        self._add_arguments(self._cut(self._extent.feed(self._text)))
        match self._extent.state:
            case Extent.OPEN:
                return False
            case Extent.BROKEN:
                self._state = _State.BROKEN
            case Extent.CLOSED if self._is_in_object:
                self._extent = JsonExtent(depth=1)
                self._state = _State.REST
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
            self._state = _State.LIST
        elif self._syntax.closing:
            self._state = _State.CLOSING
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

    def _read_closing(self) -> bool:
        closing, rest = self._syntax.closing, self._text.lstrip()
        num_blank = len(self._text) - len(rest)
        if num_blank < MAX_AROUND and closing.startswith(rest) and rest != closing:
            return False
        if num_blank < MAX_AROUND and rest.startswith(closing):
            self._cut(num_blank + len(closing))
        self._end_call()
        return True

    def _end_call(self) -> None:
        """Ends a call or a list of calls."""
        self._held.clear()
        self._only_calls = True
        self._state = _State.CONTENT

    def _cut(self, length: int) -> str:
        cut, self._text = self._text[:length], self._text[length:]
        return cut

    def _hold(self, length: int) -> None:
        if length:
            self._held.append(self._cut(length))

    def _release(self, more: str = "") -> None:
        """Emits the held text and `more` as content."""
        self._found += [piece for piece in (*self._held, more) if piece]
        self._held.clear()
        self._only_calls = False
        self._state = _State.CONTENT

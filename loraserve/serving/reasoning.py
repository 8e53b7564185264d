"""Tells what a model thinks, which it writes first and between marks, from what it says then."""

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from loraserve.serving.stop_strings import overlap


class ReasoningFormat(StrEnum):
    """The names are vLLM's."""

    DEEPSEEK_R1 = "deepseek_r1"
    """All up to `</think>`, also where neither the prompt nor the model wrote `<think>`."""
    QWEN3 = "qwen3"
    """`<think>…</think>`, where the prompt ends with the opening or the answer begins with it; most models' way."""
    MISTRAL = "mistral"
    """`[THINK]…[/THINK]`, likewise."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    opening: str
    closing: str
    may_lack_opening: bool = False


MARKS = {
    ReasoningFormat.DEEPSEEK_R1: ReasoningMarks("<think>", "</think>", may_lack_opening=True),
    ReasoningFormat.QWEN3: ReasoningMarks("<think>", "</think>"),
    ReasoningFormat.MISTRAL: ReasoningMarks("[THINK]", "[/THINK]"),
}


@dataclass(frozen=True, slots=True)
class ReasoningStart:
    """How an answer may begin."""

    marks: ReasoningMarks
    has_begun: bool
    """Whether it is in the middle of its reasoning from the first token on."""


class _State(Enum):
    BEFORE = auto()
    """The opening may come."""
    REASONING = auto()
    CONTENT = auto()


class ReasoningSplitter:
    """The outcome depends on the text alone, not on how it was cut into pieces.

    Nothing is lost but the marks, and the white space around reasoning.
    """

    __slots__ = ("_held", "_marks", "_num_tokens", "_state", "_was_found", "_was_shown")

    def __init__(self, start: ReasoningStart) -> None:
        self._marks = start.marks
        self._state = _State.BEFORE
        self._was_found = start.has_begun
        self._was_shown = False
        """Whether there was any text of the part it is in."""
        self._held = ""
        self._num_tokens = 0

    def count_token(self) -> None:
        """To be called before its text is fed."""
        self._num_tokens += self._state is not _State.CONTENT

    @property
    def num_tokens(self) -> int:
        """Of the reasoning and its marks."""
        return self._num_tokens if self._was_found else 0

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and content that became certain."""
        if self._state is _State.CONTENT and self._was_shown:
            return "", text
        self._held += text
        if self._state is _State.BEFORE:
            self._seek_opening()
        reasoning = self._read_reasoning() if self._state is _State.REASONING else ""
        return reasoning, self._read_content() if self._state is _State.CONTENT else ""

    def finish(self) -> tuple[str, str]:
        """The rest, once no text follows."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._was_found else ("", held)

    def _seek_opening(self) -> None:
        text, opening = self._held.lstrip(), self._marks.opening
        if text.startswith(opening):
            self._held = text.removeprefix(opening)
            self._was_found = True
        elif opening.startswith(text):
            return
        self._state = _State.REASONING if self._was_found else _State.CONTENT

    def _read_reasoning(self) -> str:
        text, found, rest = self._held.partition(self._marks.closing)
        if not self._was_shown:
            text = text.lstrip()
        if found:
            self._held, self._state, self._was_shown = rest, _State.CONTENT, False
            return text.rstrip()
        num_held = overlap(text, self._marks.closing)
        shown = text[: len(text) - num_held].rstrip()
        self._held = text[len(shown) :]
        self._was_shown = self._was_shown or bool(shown)
        return shown

    def _read_content(self) -> str:
        text, self._held = self._held, ""
        if self._was_found and not self._was_shown:
            text = text.lstrip()
        self._was_shown = self._was_shown or bool(text)
        return text

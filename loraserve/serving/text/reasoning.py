"""Separates a model's reasoning, which it writes first and between marks, from the content after it."""

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from loraserve.engine.request import ReasoningTokens
from loraserve.serving.text.found import CallPart
from loraserve.serving.text.stop_strings import overlap


class ReasoningFormat(StrEnum):
    """The names are vLLM's."""

    DEEPSEEK_R1 = "deepseek_r1"
    """Everything up to `</think>`, even if neither the prompt nor the model wrote `<think>`."""
    QWEN3 = "qwen3"
    """`<think>…</think>`, if the prompt ends with the opening or the answer begins with it; used by most models."""
    MISTRAL = "mistral"
    """`[THINK]…[/THINK]`, likewise."""
    OPENAI_GPTOSS = "openai_gptoss"
    """Messages on the channel `analysis`: see `harmony`."""


REASONING_ALIASES = {"glm45": ReasoningFormat.QWEN3}
"""vLLM's other names."""


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
    """The possible beginning of an answer."""

    marks: ReasoningMarks
    has_begun: bool
    """Whether the answer begins in the middle of its reasoning."""
    tokens: ReasoningTokens | None = None
    """Set if the engine follows the reasoning too, for a grammar or a limit: then only these tokens count as marks.
    Otherwise any text that equals a mark does."""

    def reader(self) -> "ReasoningSplitter":
        return ReasoningSplitter(self)


class _State(Enum):
    BEFORE = auto()
    """An opening may follow."""
    REASONING = auto()
    CONTENT = auto()


class ReasoningSplitter:
    """See `AnswerReader`.

    Only the marks and the white space around the reasoning are lost.
    """

    __slots__ = (
        "_blank",
        "_has_opened",
        "_held",
        "_may_close",
        "_num_chars",
        "_start",
        "_state",
        "_token_starts",
        "_was_found",
        "_was_shown",
    )

    def __init__(self, start: ReasoningStart) -> None:
        self._start = start
        self._state = _State.BEFORE
        self._was_found = start.has_begun
        self._was_shown = False
        """Whether text of the current part was emitted."""
        self._has_opened = start.tokens is None or start.tokens.opening_id is None
        self._may_close = start.tokens is None
        self._blank: list[str] = []
        """White space that counts only if more of the same part follows; models may write unlimited amounts of it."""
        self._held = ""
        """Text after `_blank` that may be the beginning of a mark."""
        self._num_chars = 0
        """Number of characters fed."""
        self._token_starts: list[int] = []
        """Starts of the tokens of the reasoning and its marks, as far as known: text may arrive long after tokens."""

    def take_token(self, token_id: int, start: int) -> None:
        """See `AnswerReader`."""
        tokens = self._start.tokens
        if tokens is not None:
            self._has_opened = self._has_opened or token_id == tokens.opening_id
            if not self._has_opened and len(self._token_starts) + 1 >= tokens.opens_within:
                self._state = _State.CONTENT
            self._may_close = self._may_close or token_id == tokens.closing_id
        if self._state is not _State.CONTENT:
            self._token_starts.append(start)

    @property
    def num_tokens(self) -> int:
        """See `AnswerReader`."""
        return len(self._token_starts) if self._was_found else 0

    def feed(self, text: str) -> tuple[str, str]:
        """See `AnswerReader`."""
        if self._state is _State.CONTENT and self._was_shown:
            return "", text
        self._held += text
        self._num_chars += len(text)
        if self._state is _State.BEFORE:
            self._seek_opening()
        reasoning = self._read_reasoning() if self._state is _State.REASONING else ""
        return reasoning, self._read_content() if self._state is _State.CONTENT else ""

    def taken_calls(self) -> list[CallPart]:
        """Always empty: calls are part of the content."""
        return []

    def finish(self) -> tuple[str, str]:
        """See `AnswerReader`."""
        rest = self._take_blank() + self._held
        self._held = ""
        return (self._shown(rest.rstrip()), "") if self._was_found else ("", rest)

    def _seek_opening(self) -> None:
        text, opening = self._held.lstrip(), self._start.marks.opening
        self._blank.append(self._held[: len(self._held) - len(text)])
        self._held = text
        if text.startswith(opening):
            self._held = text.removeprefix(opening)
            self._was_found = True
        elif opening.startswith(text):
            return
        self._state = _State.REASONING if self._was_found else _State.CONTENT

    def _read_reasoning(self) -> str:
        closing = self._start.marks.closing
        text, found, rest = self._held.partition(closing) if self._may_close else (self._held, "", "")
        if not found and self._may_close:
            num_certain = len(text) - overlap(text, closing)
            text, rest = text[:num_certain], text[num_certain:]
        self._held = rest
        reasoning = text.rstrip()
        shown = self._shown(self._take_blank() + reasoning) if reasoning else ""
        self._blank.append(text[len(reasoning) :])
        if found:
            del self._token_starts[bisect_left(self._token_starts, self._num_chars - len(rest)) :]
            self._state, self._was_shown = _State.CONTENT, False
        return shown

    def _read_content(self) -> str:
        text = self._take_blank() + self._held
        self._held = ""
        if self._was_found:
            return self._shown(text)
        self._was_shown = self._was_shown or bool(text)
        return text

    def _shown(self, text: str) -> str:
        """Text to emit: white space at the start of the reasoning, or of the content after it, is removed."""
        text = text if self._was_shown else text.lstrip()
        self._was_shown = self._was_shown or bool(text)
        return text

    def _take_blank(self) -> str:
        blank = "".join(self._blank)
        self._blank.clear()
        return blank

"""One choice of one prompt: engine tokens in, text out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from loraserve.engine.request import FinishReason, SequenceOutput, TokenLogprob
from loraserve.serving.text.detokenizer import Detokenizer
from loraserve.serving.text.found import CallPart
from loraserve.serving.text.stop_strings import StopMatcher


class AnswerReader(Protocol):
    """Separates reasoning from content. The outcome does not depend on how the text was cut into pieces."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the reasoning and its marks."""
        ...

    def take_token(self, token_id: int, start: int) -> None:
        """Call before the token's text is fed. start: number of characters before that text."""
        ...

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and content that became certain."""
        ...

    def finish(self) -> tuple[str, str]:
        """The remaining reasoning and content, after the last text."""
        ...

    def taken_calls(self) -> list[CallPart]:
        """Parts of calls outside the content that became certain since the last call."""
        ...


class AnswerStart(Protocol):
    """The possible beginning of an answer."""

    def reader(self) -> AnswerReader: ...


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the API process handles a choice's text; the engine does not know these options."""

    eos_token_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    """Stop strings match only in the text after this many tokens."""
    reasoning: AnswerStart | None = None
    """None = all text is content."""
    discard_tokens: bool = False
    """For max_tokens=0: drops the one token that the engine must generate."""


@dataclass(slots=True)
class ChoiceDelta:
    """New output of a choice. `token_ids`, `text_offsets` and `logprobs` (if requested) are aligned."""

    prompt_index: int
    index: int
    reasoning: str = ""
    """The model's reasoning, which precedes its text."""
    text: str = ""
    calls: list[CallPart] = field(default_factory=list)
    """Tool calls that follow the text, unless calls are part of the text."""
    token_ids: list[int] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    """Start of each token in the choice's generated text, in characters."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice; None for EOS."""


def joined(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Joins deltas of one choice, in order."""
    last = deltas[-1]
    return ChoiceDelta(
        last.prompt_index,
        last.index,
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.text for delta in deltas),
        [part for delta in deltas for part in delta.calls],
        [token_id for delta in deltas for token_id in delta.token_ids],
        [offset for delta in deltas for offset in delta.text_offsets],
        [logprob for delta in deltas for logprob in delta.logprobs],
        last.finish_reason,
        last.stop_reason,
    )


class ChoiceAssembler:
    """Processes tokens one by one, so the result does not depend on how the engine's steps were joined.

    Once a stop string is complete, only the tokens up to and including the one that completed it count. Tokens that the
    engine generated after it (it learns of the stop later) are dropped from text, token ids and logprobs.
    """

    __slots__ = (
        "_detokenizer",
        "_index",
        "_matcher",
        "_num_chars",
        "_options",
        "_prompt_index",
        "_reasoning",
        "finished",
        "num_tokens",
    )

    def __init__(self, prompt_index: int, index: int, options: TextOptions, detokenizer: Detokenizer) -> None:
        self._prompt_index = prompt_index
        self._index = index
        self._options = options
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(options.stop, options.include_stop_str_in_output) if options.stop else None
        self._reasoning = options.reasoning.reader() if options.reasoning else None
        self._num_chars = 0
        self.num_tokens = 0
        self.finished = False

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    def add(self, output: SequenceOutput) -> ChoiceDelta:
        """Do not call it once `finished`."""
        delta = ChoiceDelta(self._prompt_index, self._index)
        if not self._options.discard_tokens:
            self._add_tokens(delta, output)
        if not self.finished and output.finish_reason is not None:
            self._finish(delta, output)
        return delta

    def _add_tokens(self, delta: ChoiceDelta, output: SequenceOutput) -> None:
        stops_at = len(output.token_ids) - 1 if output.finish_reason is FinishReason.STOP else -1
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if self._reasoning is not None:
                self._reasoning.take_token(token_id, self._num_chars)
            delta.token_ids.append(token_id)
            delta.text_offsets.append(self._num_chars)
            if output.logprobs is not None:
                delta.logprobs.append(output.logprobs[position])
            if position == stops_at and self._is_silent_end(token_id):
                continue
            self._show(delta, self._detokenizer.step(token_id))
            if self.finished:
                return

    def _is_silent_end(self, token_id: int) -> bool:
        """The token that ends a choice is counted, but not part of its text."""
        ends = token_id in self._options.eos_token_ids or token_id in self._options.stop_token_ids
        return ends and not self._options.include_stop_str_in_output

    def _show(self, delta: ChoiceDelta, text: str) -> None:
        self._num_chars += len(text)
        if self._matcher is None:
            self._feed(delta, text)
        elif self.num_tokens <= self._options.min_tokens:
            self._feed(delta, self._matcher.release(text))
        else:
            self._feed(delta, self._matcher.feed(text))
            if self._matcher.matched is not None:
                self._end(delta, FinishReason.STOP, self._matcher.matched)

    def _feed(self, delta: ChoiceDelta, text: str) -> None:
        if self._reasoning is None:
            delta.text += text
            return
        self._add(delta, self._reasoning, self._reasoning.feed(text))

    def _add(self, delta: ChoiceDelta, reader: AnswerReader, read: tuple[str, str]) -> None:
        delta.reasoning += read[0]
        delta.text += read[1]
        delta.calls += reader.taken_calls()

    def _finish(self, delta: ChoiceDelta, output: SequenceOutput) -> None:
        self._show(delta, self._detokenizer.flush())
        if self.finished:
            return
        if self._matcher is not None:
            self._feed(delta, self._matcher.release())
        is_requested = output.stop_token_id in self._options.stop_token_ids
        self._end(delta, output.finish_reason, output.stop_token_id if is_requested else None)

    def _end(self, delta: ChoiceDelta, reason: FinishReason | None, stop_reason: str | int | None) -> None:
        self.finished = True
        if self._reasoning is not None:
            self._add(delta, self._reasoning, self._reasoning.finish())
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        if self._options.discard_tokens and reason is FinishReason.STOP:
            delta.finish_reason, delta.stop_reason = FinishReason.LENGTH, None

"""The response formats of /v1/completions."""

from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from loraserve.api.inference.chunks import ChunkHead
from loraserve.api.inference.prompt_logprobs import prompt_logprobs
from loraserve.api.inference.token_names import TokenNames, finite
from loraserve.api.schemas.completions import CompletionChoice, CompletionLogprobs, CompletionResponse
from loraserve.api.schemas.usage import usage_of
from loraserve.engine.request import TokenLogprob
from loraserve.serving.generation import Generation, PromptRun
from loraserve.serving.text.choice import ChoiceDelta
from loraserve.serving.text.token_text import TokenText


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    text: str
    text_offsets: list[int]
    """Start of each prompt token in `text`."""


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    return_token_ids: bool
    tokens_as_ids: bool
    echo: list[EchoedPrompt] | None
    """One per prompt, if the prompts are to be echoed."""


class CompletionWriter:
    """One per request: it remembers which choices have begun."""

    def __init__(self, head: ChunkHead, options: CompletionOptions, token_text: TokenText) -> None:
        self.head = head
        self._options = options
        self._token_text = token_text
        self._names = TokenNames(token_text, options.tokens_as_ids)
        self._begun: set[int] = set()

    def response(self, deltas: list[ChoiceDelta], generation: Generation) -> CompletionResponse:
        return CompletionResponse(
            id=self.head.id,
            object=self.head.object,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.system_fingerprint,
            choices=[self._choice(delta, generation.prompts[delta.prompt_index]) for delta in deltas],
            usage=usage_of(generation.usage()),
        )

    def opening(self, generation: Generation) -> list[msgspec.Struct]:
        return []

    def prompt_fields(self, generation: Generation) -> dict[str, object]:
        """Empty: each choice has the fields of its own prompt."""
        return {}

    def chunk_choices(self, delta: ChoiceDelta, generation: Generation) -> list[msgspec.Struct]:
        if not delta.token_ids and not delta.text and delta.finish_reason is None:
            return []
        return [self._choice(delta, generation.prompts[delta.prompt_index])]

    def _choice(self, delta: ChoiceDelta, prompt: PromptRun) -> CompletionChoice:
        options = self._options
        index = delta.prompt_index * options.n + delta.index
        is_first = index not in self._begun
        self._begun.add(index)
        echo = options.echo[delta.prompt_index] if options.echo else None
        of_prompt = is_first and options.return_token_ids
        return CompletionChoice(
            index=index,
            text=echo.text + delta.text if echo and is_first else delta.text,
            logprobs=self._logprobs(delta, prompt, echo, is_first),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if options.return_token_ids else UNSET,
            prompt_token_ids=prompt.engine_request.prompt_token_ids if of_prompt else UNSET,
            prompt_logprobs=UNSET
            if options.prompt_logprobs is None
            else prompt_logprobs(prompt.prompt_logprobs, options.prompt_logprobs, self._token_text),
        )

    def _logprobs(
        self, delta: ChoiceDelta, prompt: PromptRun, echo: EchoedPrompt | None, is_first: bool
    ) -> CompletionLogprobs | None:
        if self._options.logprobs is None:
            return None
        start = len(echo.text) if echo else 0
        offsets = [start + offset for offset in delta.text_offsets]
        token_ids: list[int] = delta.token_ids
        tokens: list[TokenLogprob | None] = [*delta.logprobs]
        if echo and is_first:
            offsets = echo.text_offsets + offsets
            token_ids = prompt.engine_request.prompt_token_ids + token_ids
            tokens = (prompt.prompt_logprobs or [None] * len(echo.text_offsets)) + tokens
        return self._logprob_lists(offsets, token_ids, tokens, self._options.logprobs)

    def _logprob_lists(
        self, offsets: list[int], token_ids: list[int], tokens: list[TokenLogprob | None], count: int
    ) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[None if token is None else finite(token.logprob) for token in tokens],
            tokens=[self._names.name(token_id) for token_id in token_ids],
            top_logprobs=[None if token is None else self._names.top(token, count) for token in tokens],
        )

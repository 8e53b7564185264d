"""Writes answers in LoRAX's format."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET

from loraserve.api.http.errors import cut_short
from loraserve.api.inference.call import InferenceCall
from loraserve.api.inference.respond import Steps, client_error
from loraserve.api.inference.token_names import finite
from loraserve.api.lorax.errors import lorax_error
from loraserve.api.schemas.lorax import (
    AlternativeToken,
    LoraxDetails,
    LoraxParameters,
    LoraxResponse,
    LoraxStreamDetails,
    LoraxStreamEvent,
    LoraxToken,
    PrefillToken,
)
from loraserve.engine.request import FinishReason, TokenLogprob
from loraserve.serving.generation import Generation
from loraserve.serving.text.choice import ChoiceDelta
from loraserve.serving.text.tokenizer import TextTokenizer


class LoraxWriter:
    """One per request."""

    def __init__(self, tokenizer: TextTokenizer, prompt: str, parameters: LoraxParameters, seed: int | None) -> None:
        """seed: shown in details; None for greedy decoding."""
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._parameters = parameters
        self._seed = seed

    def response(self, delta: ChoiceDelta, generation: Generation) -> LoraxResponse:
        """delta: the whole answer. Raises `ServingError` if it was cut short."""
        prompt_ids = generation.prompts[0].engine_request.prompt_token_ids
        details = LoraxDetails(
            finish_reason=_finish_reason(delta),
            prompt_tokens=len(prompt_ids),
            generated_tokens=len(delta.token_ids),
            seed=self._seed,
            prefill=self._prefill(prompt_ids, generation.prompts[0].prompt_logprobs),
            tokens=list(map(self._token, delta.logprobs, self._texts(prompt_ids, delta.token_ids))),
        )
        return LoraxResponse(self._full(delta.text), details if self._parameters.details else UNSET)

    async def events(self, steps: Steps, generation: Generation, call: InferenceCall) -> AsyncGenerator[bytes]:
        """One event per token. NOTE: raises nothing, because an exception would only break the connection."""
        encoder = msgspec.json.Encoder()
        try:
            async with aclosing(steps):
                async for event in self._events(steps, generation):
                    if event.details is not None:
                        call.close()
                    yield b"data:" + encoder.encode(event) + b"\n\n"
        except Exception as error:
            yield b"data:" + encoder.encode(lorax_error(client_error(error, call))[1]) + b"\n\n"

    async def _events(self, steps: Steps, generation: Generation) -> AsyncGenerator[LoraxStreamEvent]:
        prompt_ids = generation.prompts[0].engine_request.prompt_token_ids
        detokenizer = self._tokenizer.detokenizer(prompt_ids, skip_special_tokens=False)
        text, num_tokens = "", 0
        async for deltas in steps:
            for delta in deltas:
                text += delta.text
                num_tokens += len(delta.token_ids)
                tokens = [self._token(token, detokenizer.step(token.token_id)) for token in delta.logprobs]
                for token in tokens[:-1] if delta.finish_reason else tokens:
                    yield LoraxStreamEvent(token, None, None)
                if delta.finish_reason:
                    last = tokens[-1] if tokens else LoraxToken(0, "", 0.0, special=True, skipped=True)
                    yield LoraxStreamEvent(
                        last,
                        self._full(text),
                        LoraxStreamDetails(
                            finish_reason=_finish_reason(delta),
                            prompt_tokens=len(prompt_ids),
                            generated_tokens=num_tokens,
                            seed=self._seed,
                        ),
                    )

    def _texts(self, prompt_ids: list[int], token_ids: list[int]) -> list[str]:
        detokenizer = self._tokenizer.detokenizer(prompt_ids, skip_special_tokens=False)
        return [detokenizer.step(token_id) for token_id in token_ids]

    def _token(self, token: TokenLogprob, text: str) -> LoraxToken:
        token_text, count = self._tokenizer.token_text, self._parameters.return_k_alternatives
        return LoraxToken(
            token.token_id,
            text,
            finite(token.logprob),
            special=token.token_id in token_text.special_ids,
            alternative_tokens=[
                AlternativeToken(token_id, token_text.text_of(token_id), finite(logprob))
                for token_id, logprob in token.top[:count]
            ]
            if count
            else UNSET,
        )

    def _prefill(self, prompt_ids: list[int], logprobs: list[TokenLogprob | None] | None) -> list[PrefillToken]:
        token_text = self._tokenizer.token_text
        return [
            PrefillToken(token_id, token_text.text_of(token_id), None if token is None else finite(token.logprob))
            for token_id, token in zip(prompt_ids, logprobs or [], strict=False)
        ]

    def _full(self, text: str) -> str:
        return self._prompt + text if self._parameters.return_full_text else text


def _finish_reason(delta: ChoiceDelta) -> str:
    match delta.finish_reason:
        case FinishReason.LENGTH:
            return "length"
        case FinishReason.STOP:
            return "eos_token" if delta.stop_reason is None else "stop_sequence"
        case _:
            raise cut_short()

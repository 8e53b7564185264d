"""The response formats of /v1/responses."""

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from functools import partial
from itertools import chain

import msgspec

from loraserve.api.inference.call import InferenceCall
from loraserve.api.inference.respond import Steps, client_error, size_of
from loraserve.api.responses.output import ResponseOutput
from loraserve.api.schemas.response_answer import (
    COMPLETED,
    FAILED,
    INCOMPLETE,
    IncompleteDetails,
    ResponseFailure,
    ResponseObject,
    response_usage,
)
from loraserve.api.schemas.response_events import ErrorEvent, LifecycleEvent, ResponseEvent
from loraserve.engine.request import FinishReason
from loraserve.serving.errors import ServingError
from loraserve.serving.generation import Generation
from loraserve.serving.text.choice import ChoiceDelta
from loraserve.serving.text.tokenizer import TextTokenizer

MAX_OUTPUT_TOKENS = "max_output_tokens"
FAILURE_CODE = "server_error"
"""One of the few codes that OpenAI's clients know; the `error` event has the exact code."""


class ResponseWriter:
    """One per request."""

    def __init__(self, begun: ResponseObject, output: ResponseOutput) -> None:
        """begun: the response before it has any output."""
        self._begun = begun
        self._output = output
        self._encoder = EventEncoder()

    def response(self, deltas: list[ChoiceDelta], generation: Generation) -> ResponseObject:
        """deltas: the only choice, complete. Raises `ServingError` if it was cut short."""
        for _ in self._output.feed(deltas[0]):
            pass
        return self._ended(deltas[0].finish_reason, generation)

    async def events(
        self, steps: Steps, generation: Generation, call: InferenceCall, tokenizer: TextTokenizer
    ) -> AsyncGenerator[bytes]:
        """NOTE: never raises: after the first byte, an exception would only cut the connection."""
        num_prompt_tokens = generation.num_sent_prompt_tokens
        size = 0
        try:
            async with aclosing(steps):
                # These events and the last one contain the instructions and tools.
                yield await tokenizer.run(num_prompt_tokens, self._opening)
                async for deltas in steps:
                    step_size = size_of(deltas)
                    size += step_size
                    if generation.finished:  # The last events repeat the whole output.
                        step_size = num_prompt_tokens + size
                    encoded = await tokenizer.run(step_size, partial(self._step, deltas, generation))
                    if generation.finished:
                        call.close()
                    if encoded:
                        yield encoded
        except Exception as error:
            yield self._encoder.encoded(self._failure(client_error(error, call), generation))

    def _opening(self) -> bytes:
        names = ("response.created", "response.in_progress")
        return self._encoder.encoded(LifecycleEvent(name, self._begun) for name in names)

    def _step(self, deltas: list[ChoiceDelta], generation: Generation) -> bytes:
        return self._encoder.encoded(self._events(deltas, generation))

    def _events(self, deltas: list[ChoiceDelta], generation: Generation) -> Iterator[ResponseEvent]:
        for delta in deltas:
            yield from self._output.feed(delta)
            if delta.finish_reason is not None:
                response = self._ended(delta.finish_reason, generation)
                yield LifecycleEvent(f"response.{response.status}", response)

    def _ended(self, reason: FinishReason | None, generation: Generation) -> ResponseObject:
        """Without `incomplete_details` if a stop string cut off a call: OpenAI's clients know no reason for that."""
        is_too_long = reason is FinishReason.LENGTH
        return msgspec.structs.replace(
            self._begun,
            status=INCOMPLETE if self._output.is_cut_off else COMPLETED,
            incomplete_details=IncompleteDetails(MAX_OUTPUT_TOKENS) if is_too_long else None,
            output=self._output.items,
            usage=response_usage(generation.usage()),
        )

    def _failure(self, error: ServingError, generation: Generation) -> Iterable[ResponseEvent]:
        """Two events, because some clients handle only one of them."""
        response = msgspec.structs.replace(
            self._begun,
            status=FAILED,
            error=ResponseFailure(FAILURE_CODE, error.message),
            output=self._output.items,
            usage=response_usage(generation.usage()),
        )
        return ErrorEvent("error", error.code, error.message, error.param), LifecycleEvent("response.failed", response)


class EventEncoder:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self._num_events = 0

    def encoded(self, events: Iterable[ResponseEvent]) -> bytes:
        return b"".join(chain.from_iterable(map(self._parts, events)))

    def _parts(self, event: ResponseEvent) -> tuple[bytes, ...]:
        number = self._num_events
        self._num_events += 1
        body = self._encoder.encode(event)
        head = b'event: %b\ndata: {"sequence_number":%d,' % (event.type.encode(), number)
        return head, body[1:], b"\n\n"

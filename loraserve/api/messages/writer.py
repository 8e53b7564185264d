"""The response formats of /v1/messages."""

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from functools import partial

import msgspec
from litestar.types import Scope

from loraserve.api.inference.call import InferenceCall
from loraserve.api.inference.respond import Steps, client_error, size_of
from loraserve.api.messages.errors import message_error
from loraserve.api.messages.output import MessageOutput
from loraserve.api.schemas.message_answer import Message, MessageError, MessageUsage, message_usage
from loraserve.api.schemas.message_events import MessageDelta, MessageEvent, MessageStart, MessageStop
from loraserve.serving.generation import Generation
from loraserve.serving.text.choice import ChoiceDelta
from loraserve.serving.text.tokenizer import TextTokenizer


class MessageWriter:
    """One per request."""

    def __init__(self, message_id: str, model: str, output: MessageOutput) -> None:
        """model: name of the answering model."""
        self._id = message_id
        self._model = model
        self._output = output
        self._encoder = msgspec.json.Encoder()

    def message(self, deltas: list[ChoiceDelta], generation: Generation) -> Message:
        """deltas: the only choice, complete. Raises `ServingError` if it was cut short."""
        for _ in self._output.feed(deltas[0]):
            pass
        stop = self._output.stop
        assert stop is not None
        return Message(
            id=self._id,
            model=self._model,
            content=self._output.blocks,
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=message_usage(generation.usage()),
        )

    async def events(
        self, steps: Steps, generation: Generation, call: InferenceCall, tokenizer: TextTokenizer, scope: Scope
    ) -> AsyncGenerator[bytes]:
        """NOTE: never raises: after the first byte, an exception would only cut the connection."""
        size = 0
        try:
            async with aclosing(steps):
                yield self._encoded([MessageStart(self._begun(generation))])
                async for deltas in steps:
                    size += size_of(deltas)
                    encoded = await tokenizer.run(size, partial(self._step, deltas, generation))
                    if generation.finished:
                        call.close()
                    if encoded:
                        size = 0  # Otherwise the output is held back until a later step.
                        yield encoded
        except Exception as error:
            yield self._encoded([message_error(client_error(error, call), scope)])

    def _begun(self, generation: Generation) -> Message:
        usage = message_usage(generation.usage())
        if not usage.input_tokens and not usage.cache_read_input_tokens:  # The engine has not started the prompt.
            usage = MessageUsage(generation.num_sent_prompt_tokens, 0, 0)
        return Message(id=self._id, model=self._model, usage=msgspec.structs.replace(usage, output_tokens=0))

    def _step(self, deltas: list[ChoiceDelta], generation: Generation) -> bytes:
        return self._encoded(self._events(deltas, generation))

    def _events(self, deltas: list[ChoiceDelta], generation: Generation) -> Iterator[MessageEvent]:
        for delta in deltas:
            yield from self._output.feed(delta)
            if self._output.stop is not None:
                yield MessageDelta(self._output.stop, message_usage(generation.usage()))
                yield MessageStop()

    def _encoded(self, events: Iterable[MessageEvent | MessageError]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, event: MessageEvent | MessageError) -> bytes:
        name = str(event.__struct_config__.tag)
        return b"event: %b\ndata: %b\n\n" % (name.encode(), self._encoder.encode(event))

"""Runs a generation for a client and writes it as a single response or a stream."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Generic, Protocol, Self, TypeVar, cast

import msgspec
from litestar import MediaType, Request, Response

from loraserve.api.http.disconnect import wait_connected, while_connected
from loraserve.api.http.errors import error_body, internal_error
from loraserve.api.http.event_stream import DONE, EventStream
from loraserve.api.inference.call import InferenceCall
from loraserve.api.inference.chunks import ChunkEncoder, ChunkHead
from loraserve.api.inference.timing import request_metrics, timing_headers
from loraserve.api.schemas.metrics import RequestMetrics
from loraserve.api.schemas.sampling import GenerationFields, StreamOptions
from loraserve.api.schemas.usage import usage_of
from loraserve.serving.errors import ServingError
from loraserve.serving.generation import Generation, collect
from loraserve.serving.runtime import Runtime
from loraserve.serving.text.choice import ChoiceDelta
from loraserve.serving.text.tokenizer import INLINE_SIZE, TextTokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct, covariant=True)
A = TypeVar("A")


class Steps:
    """The steps of a generation, of which the first is already awaited.

    Not a generator, which would add a frame to the call stack of each token.
    """

    def __init__(self, first: asyncio.Future[list[ChoiceDelta]], later: AsyncGenerator[list[ChoiceDelta]]) -> None:
        self._first: asyncio.Future[list[ChoiceDelta]] | None = first
        self._later = later

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[list[ChoiceDelta]]:
        first, self._first = self._first, None
        return self._later.__anext__() if first is None else first

    async def aclose(self) -> None:
        await self._later.aclose()


class Writer(Protocol[T]):
    """The response formats of one API. `head` has the fields that all chunks of a stream share."""

    @property
    def head(self) -> ChunkHead: ...

    def response(self, deltas: list[ChoiceDelta], generation: Generation) -> T:
        """deltas: every choice, complete."""
        ...

    def opening(self, generation: Generation) -> list[msgspec.Struct]:
        """Chunks that open the choices of a stream, sent with the first output."""
        ...

    def prompt_fields(self, generation: Generation) -> dict[str, object]:
        """Fields about the prompt in the first chunk of a stream, next to `choices`."""
        ...

    def chunk_choices(self, delta: ChoiceDelta, generation: Generation) -> list[msgspec.Struct]:
        """One chunk each; empty if there is nothing to send."""
        ...


async def respond(
    request: Request,
    runtime: Runtime,
    call: InferenceCall,
    generation: Generation,
    writer: Writer[T],
    fields: GenerationFields,
) -> Response[T] | EventStream:
    """Raises `ServingError` for any error before the first byte; the call must then still be closed."""
    if fields.stream:
        body = partial(
            _body, generation=generation, call=call, writer=writer, fields=fields, tokenizer=runtime.tokenizer
        )
        return await open_stream(request, runtime, call, generation, body)

    def written(deltas: list[ChoiceDelta]) -> T:
        response = writer.response(deltas, generation)
        if fields.include_metrics:
            response = msgspec.structs.replace(response, metrics=_metrics(call, generation))
        return response

    return await respond_complete(request, runtime, call, generation, written)


async def respond_complete(
    request: Request,
    runtime: Runtime,
    call: InferenceCall,
    generation: Generation,
    write: Callable[[list[ChoiceDelta]], A],
    more_headers: Callable[[], dict[str, str]] = dict,
    more_size: int = 0,
) -> Response[A]:
    """One body, which `write` makes from all complete choices. Closes the call, unless it raises `ServingError`.

    more_size: size of what is written besides tokens, in tokens.
    """
    deltas = await while_connected(request, collect(generation.steps()))
    # With echo or prompt logprobs, responses are as long as prompts.
    size = generation.usage().num_prompt_tokens + size_of(deltas) + more_size
    body = await runtime.tokenizer.run(size, lambda: msgspec.json.encode(write(deltas)))
    headers = call.headers | timing_headers(generation, call.adapter_load_ms) | more_headers()
    call.close()
    return Response(cast(A, body), media_type=MediaType.JSON, headers=headers)


async def open_stream(
    request: Request,
    runtime: Runtime,
    call: InferenceCall,
    generation: Generation,
    body: Callable[[Steps], AsyncGenerator[bytes]],
) -> EventStream:
    """A stream of the bytes that `body` makes from the steps; closes the call at its end.

    It opens with the first output, or without it after `first_output_wait_s`.

    NOTE: `body` must close the call too, before it yields the last bytes: the client may send its next request as soon
    as it has them, and this one must not count as running by then.
    """
    steps = generation.steps()
    first = asyncio.ensure_future(anext(steps))
    try:
        await wait_connected(request, first, runtime.settings.first_output_wait_s)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        raise

    def end() -> None:
        first.cancel()
        call.close()

    headers = call.headers | timing_headers(generation, call.adapter_load_ms)
    return EventStream(body(Steps(first, steps)), end, runtime.settings.ping_interval_s, headers)


async def _body(
    steps: Steps,
    *,
    generation: Generation,
    call: InferenceCall,
    writer: Writer[T],
    fields: GenerationFields,
    tokenizer: TextTokenizer,
) -> AsyncGenerator[bytes]:
    """NOTE: never raises: after the first byte, an exception would only cut the connection."""
    chunks = _Chunks(writer, generation, fields)
    try:
        async with contextlib.aclosing(steps):
            async for deltas in steps:
                size = chunks.size_of(deltas)
                if size <= INLINE_SIZE:  # Nearly always; saves a coroutine per token.
                    encoded = chunks.encode(deltas)
                else:
                    encoded = await tokenizer.run(size, partial(chunks.encode, deltas))
                if generation.finished:
                    encoded.append(chunks.ending(call))  # in the same write as the last token
                    call.close()
                if encoded:
                    yield b"".join(encoded)
    except Exception as error:
        yield error_event(client_error(error, call))


class _Chunks(Generic[T]):
    """The chunks of one stream."""

    def __init__(self, writer: Writer[T], generation: Generation, fields: GenerationFields) -> None:
        self._writer = writer
        self._generation = generation
        self._fields = fields
        self._options = fields.stream_options or StreamOptions()
        self._encoder = ChunkEncoder(writer.head, usage_field=self._options.include_usage)
        self._opened = False
        self._begun: set[tuple[int, int]] = set()

    def size_of(self, deltas: list[ChoiceDelta]) -> int:
        """Size of the encoding work. A choice's first delta counts its prompt too, because it may be echoed."""
        size = size_of(deltas)
        for delta in deltas:
            choice = delta.prompt_index, delta.index
            if choice not in self._begun:
                self._begun.add(choice)
                size += len(self._generation.prompts[delta.prompt_index].engine_request.prompt_token_ids)
        return size

    def encode(self, deltas: list[ChoiceDelta]) -> list[bytes]:
        choices = [choice for delta in deltas for choice in self._writer.chunk_choices(delta, self._generation)]
        fields: dict[str, object] = {}
        if choices and not self._opened:
            self._opened = True
            choices = self._writer.opening(self._generation) + choices
            fields = self._writer.prompt_fields(self._generation)
        usage = usage_of(self._generation.usage()) if self._options.continuous_usage_stats else None
        return [
            self._encoder.chunk(choice, usage, **(fields if place == 0 else {})) for place, choice in enumerate(choices)
        ]

    def ending(self, call: InferenceCall) -> bytes:
        """The bytes after the last choice."""
        if not self._options.include_usage and not self._fields.include_metrics:
            return DONE
        usage = usage_of(self._generation.usage()) if self._options.include_usage else None
        metrics = {"metrics": _metrics(call, self._generation)} if self._fields.include_metrics else {}
        return self._encoder.chunk(None, usage, **metrics) + DONE


def size_of(deltas: list[ChoiceDelta]) -> int:
    """Number of tokens and of their listed alternatives, as a measure of the encoding work."""
    size = 0
    for delta in deltas:
        size += len(delta.token_ids)
        if delta.logprobs:
            size += len(delta.logprobs) * (1 + len(delta.logprobs[0].top))
    return size


def client_error(error: Exception, call: InferenceCall) -> ServingError:
    """The error to report to the client in the middle of a stream. Records and counts it."""
    call.note(error)
    if isinstance(error, ServingError):
        refusal = error
    else:
        logger.error("a stream failed", exc_info=error)
        refusal = internal_error()
    call.count_error(refusal)
    return refusal


def _metrics(call: InferenceCall, generation: Generation) -> RequestMetrics:
    return request_metrics(generation, call.adapter_load_ms, call.adapter.version if call.adapter else None)


def error_event(error: ServingError) -> bytes:
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"

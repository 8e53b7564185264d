"""Runs a generation for a client and writes it as one response or as a stream."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Protocol, Self, TypeVar, cast

import msgspec
from litestar import MediaType, Request, Response

from loraserve.api.chunks import ChunkEncoder, ChunkHead
from loraserve.api.disconnect import wait_connected, while_connected
from loraserve.api.errors import error_body, internal_error
from loraserve.api.event_stream import DONE, EventStream
from loraserve.api.inference_call import InferenceCall
from loraserve.api.schemas.metrics import RequestMetrics
from loraserve.api.schemas.sampling import GenerationFields, StreamOptions
from loraserve.api.schemas.usage import usage_of
from loraserve.api.timing import request_metrics, timing_headers
from loraserve.serving.choice import ChoiceDelta
from loraserve.serving.errors import ServingError
from loraserve.serving.generation import Generation, collect
from loraserve.serving.runtime import Runtime
from loraserve.serving.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct, covariant=True)


class Steps:
    """Of a generation; the first is on its way.

    No generator: it would be one more frame to go through for each token.
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
    """One API's shapes. `head` has the fields that all its stream chunks share."""

    @property
    def head(self) -> ChunkHead: ...

    def response(self, deltas: list[ChoiceDelta], generation: Generation) -> T:
        """deltas: every choice, complete."""
        ...

    def opening(self, generation: Generation) -> list[msgspec.Struct]:
        """What a stream's choices begin with, sent with the first output."""
        ...

    def chunk_choices(self, delta: ChoiceDelta, generation: Generation) -> list[msgspec.Struct]:
        """One chunk each; none where there is nothing to tell."""
        ...


async def respond(
    request: Request,
    runtime: Runtime,
    call: InferenceCall,
    generation: Generation,
    writer: Writer[T],
    asked: GenerationFields,
) -> Response[T] | EventStream:
    """Raises `ServingError` for whatever goes wrong before the first byte; then the call is still to be closed."""
    if asked.stream:
        body = partial(_body, generation=generation, call=call, writer=writer, asked=asked, tokenizer=runtime.tokenizer)
        return await open_stream(request, runtime, call, generation, body)
    deltas = await while_connected(request, collect(generation.steps()))

    def encoded() -> bytes:
        response = writer.response(deltas, generation)
        if asked.include_metrics:
            response = msgspec.structs.replace(response, metrics=_metrics(call, generation))
        return msgspec.json.encode(response)

    # Echoes and prompt logprobs make responses as long as prompts, so they are also encoded off the loop.
    body = await runtime.tokenizer.run(generation.usage().num_prompt_tokens, encoded)
    headers = call.headers | timing_headers(generation, call.adapter_load_ms)
    call.close()
    return Response(cast(T, body), media_type=MediaType.JSON, headers=headers)


async def open_stream(
    request: Request,
    runtime: Runtime,
    call: InferenceCall,
    generation: Generation,
    body: Callable[[Steps], AsyncGenerator[bytes]],
) -> EventStream:
    """A stream of what `body` makes of the steps, opened when there is something or it took long; closes the call."""
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
    asked: GenerationFields,
    tokenizer: TextTokenizer,
) -> AsyncGenerator[bytes]:
    """NOTE: raises nothing: after the first byte, an exception would only cut the connection."""
    options = asked.stream_options or StreamOptions()
    encoder = ChunkEncoder(writer.head, usage_field=options.include_usage)
    try:
        async with contextlib.aclosing(steps):
            opened = False
            async for deltas in steps:
                if opened:
                    choices = _choices(writer, deltas, generation)
                else:
                    work = partial(_choices, writer, deltas, generation)
                    choices = await tokenizer.run(generation.usage().num_prompt_tokens, work)
                    if choices:
                        opened = True
                        choices = writer.opening(generation) + choices
                usage = usage_of(generation.usage()) if options.continuous_usage_stats else None
                chunks = [encoder.chunk(choice, usage) for choice in choices]
                if generation.finished:
                    chunks.append(_ending(encoder, generation, call, asked))  # in one write with the last token
                if chunks:
                    yield b"".join(chunks)
    except Exception as error:
        yield error_event(told(error, call))


def _ending(encoder: ChunkEncoder, generation: Generation, call: InferenceCall, asked: GenerationFields) -> bytes:
    """What follows the last choice."""
    include_usage = asked.stream_options is not None and asked.stream_options.include_usage
    if not include_usage and not asked.include_metrics:
        return DONE
    usage = usage_of(generation.usage()) if include_usage else None
    metrics = _metrics(call, generation) if asked.include_metrics else None
    return encoder.chunk(None, usage, metrics) + DONE


def told(error: Exception, call: InferenceCall) -> ServingError:
    """What the client is told of an error in the middle of a stream."""
    call.note(error)
    if isinstance(error, ServingError):
        refusal = error
    else:
        logger.error("a stream failed", exc_info=error)
        refusal = internal_error()
    call.count_error(refusal)
    return refusal


def _choices(writer: Writer[T], deltas: list[ChoiceDelta], generation: Generation) -> list[msgspec.Struct]:
    return [choice for delta in deltas for choice in writer.chunk_choices(delta, generation)]


def _metrics(call: InferenceCall, generation: Generation) -> RequestMetrics:
    return request_metrics(generation, call.adapter_load_ms, call.adapter.version if call.adapter else None)


def error_event(error: ServingError) -> bytes:
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"

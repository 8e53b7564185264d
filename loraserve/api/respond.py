"""Runs a generation for a client and writes it as one response or as a stream."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Protocol, TypeVar, cast

import msgspec
from litestar import MediaType, Request, Response

from loraserve.api.chunks import ChunkEncoder, ChunkHead
from loraserve.api.disconnect import wait_connected, while_connected
from loraserve.api.errors import error_body, internal_error
from loraserve.api.event_stream import DONE, EventStream
from loraserve.api.schemas.sampling import StreamOptions
from loraserve.api.schemas.usage import usage_of
from loraserve.serving.choice import ChoiceDelta
from loraserve.serving.errors import ServingError
from loraserve.serving.generation import Generation, GenerationJob, collect
from loraserve.serving.runtime import Runtime
from loraserve.serving.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct, covariant=True)

Steps = AsyncIterator[list[ChoiceDelta]]


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
    job: GenerationJob,
    writer: Writer[T],
    *,
    stream: bool | None,
    options: StreamOptions | None,
) -> Response[T] | EventStream:
    """Raises `ServingError` for whatever goes wrong before the first byte."""
    generation = runtime.generation.start(job)
    try:
        if stream:
            return await _open_stream(request, runtime, generation, writer, options or StreamOptions())
        deltas = await while_connected(request, collect(generation.steps()))
    except BaseException:
        generation.close()
        raise
    # Echoes and prompt logprobs make responses as long as prompts, so they are also encoded off the loop.
    size = generation.usage().num_prompt_tokens
    body = await runtime.tokenizer.run(size, lambda: msgspec.json.encode(writer.response(deltas, generation)))
    return Response(cast(T, body), media_type=MediaType.JSON)


async def _open_stream(
    request: Request, runtime: Runtime, generation: Generation, writer: Writer[T], options: StreamOptions
) -> EventStream:
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
        generation.close()

    body = _body(_with_first(first, steps), generation, writer, options, runtime.tokenizer)
    return EventStream(body, end, runtime.settings.ping_interval_s)


async def _with_first(first: asyncio.Future[list[ChoiceDelta]], steps: Steps) -> AsyncGenerator[list[ChoiceDelta]]:
    yield await first
    async for deltas in steps:
        yield deltas


async def _body(
    steps: AsyncGenerator[list[ChoiceDelta]],
    generation: Generation,
    writer: Writer[T],
    options: StreamOptions,
    tokenizer: TextTokenizer,
) -> AsyncGenerator[bytes]:
    """NOTE: raises nothing: after the first byte, an exception would only cut the connection."""
    encoder = ChunkEncoder(writer.head, usage_field=options.include_usage)
    try:
        async with contextlib.aclosing(steps):
            opened = False
            async for deltas in steps:
                size = 0 if opened else generation.usage().num_prompt_tokens
                choices = await tokenizer.run(size, partial(_choices, writer, deltas, generation))
                if not opened and choices:
                    opened = True
                    choices = writer.opening(generation) + choices
                usage = usage_of(generation.usage()) if options.continuous_usage_stats else None
                if chunks := b"".join(encoder.chunk(choice, usage) for choice in choices):
                    yield chunks
    except ServingError as error:
        yield _error_event(error)
        return
    except Exception as error:
        logger.error("a stream failed", exc_info=error)
        yield _error_event(internal_error())
        return
    last = encoder.chunk(None, usage_of(generation.usage())) if options.include_usage else b""
    yield last + DONE


def _choices(writer: Writer[T], deltas: list[ChoiceDelta], generation: Generation) -> list[msgspec.Struct]:
    return [choice for delta in deltas for choice in writer.chunk_choices(delta, generation)]


def _error_event(error: ServingError) -> bytes:
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"

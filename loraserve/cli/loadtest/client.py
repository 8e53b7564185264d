"""Sends one request of a load test and measures its stream.

The generator shares the machine's cores with the server, so chunks are timed and counted as bytes; only the last one,
with the usage, is parsed.
"""

import json
import time
from dataclasses import dataclass, field

import httpx

from loraserve.cli.loadtest.plan import PlannedRequest

EVENT = b"data: "
USAGE = b'"usage":'
EMPTY_EVENTS = (b'"role":', b'"delta":{}', b'"choices":[],', b"data: [DONE]")
"""What marks an event without output: the opening and the end of a chat, the usage, the end of the stream."""


@dataclass(slots=True)
class RequestResult:
    model: str
    sent_s: float
    """`time.perf_counter()`."""
    late_s: float = 0.0
    """How much after its planned time it was sent."""
    ttft_s: float | None = None
    """From sending to the first token's arrival."""
    e2e_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Between chunks with tokens."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.e2e_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestStyle:
    """What all requests of a test have in common."""

    chat: bool = False
    ignore_eos: bool = True
    temperature: float = 0.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, request: PlannedRequest) -> dict[str, object]:
        prompt = (
            {"messages": [{"role": "user", "content": request.prompt}]} if self.chat else {"prompt": request.prompt}
        )
        extras = {"ignore_eos": True, "min_tokens": request.max_tokens} if self.ignore_eos else {}
        return {
            "model": request.model,
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **prompt,
            **extras,
        }


async def send(
    client: httpx.AsyncClient, style: RequestStyle, request: PlannedRequest, late_s: float = 0.0
) -> RequestResult:
    """Never raises for what the server or network does: the result says so."""
    result = RequestResult(request.model, time.perf_counter(), late_s)
    try:
        async with client.stream("POST", style.path, json=style.body(request)) as response:
            if response.status_code != 200:
                body = await response.aread()
                result.error = f"HTTP {response.status_code}: {_error_message(body)}"
                return result
            await _measure(response, result)
    except httpx.HTTPError as error:
        result.error = f"{type(error).__name__}: {error}"
        return result
    result.error = _mismatch(result, request, style)
    return result


async def _measure(response: httpx.Response, result: RequestResult) -> None:
    last_s: float | None = None
    tail = b""
    async for chunk in response.aiter_raw():
        now_s = time.perf_counter()
        # Two chunks back are enough: usage and the end mark are the last two events, however they are cut.
        tail = tail[-8192:] + chunk
        if not _has_token(chunk):
            continue
        if last_s is None:
            result.ttft_s = now_s - result.sent_s
        else:
            result.gaps_s.append(now_s - last_s)
        last_s = now_s
    result.e2e_s = (last_s or time.perf_counter()) - result.sent_s
    _read_tail(tail, result)


def _has_token(chunk: bytes) -> bool:
    """Whether any event carries output. Counts, because one chunk may hold several events."""
    return chunk.count(EVENT) > sum(chunk.count(mark) for mark in EMPTY_EVENTS)


def _read_tail(tail: bytes, result: RequestResult) -> None:
    events = [event for event in tail.split(b"\n\n") if event.startswith(EVENT)]
    for event in events:
        if event.startswith(b'data: {"error"'):
            result.error = _error_message(event.removeprefix(EVENT))
        elif USAGE in event:
            usage = json.loads(event.removeprefix(EVENT)).get("usage")
            if usage:
                result.prompt_tokens = usage["prompt_tokens"]
                result.output_tokens = usage["completion_tokens"]


def _mismatch(result: RequestResult, request: PlannedRequest, style: RequestStyle) -> str | None:
    """A server that generates less than asked for would look fast."""
    if result.error:
        return result.error
    if result.output_tokens == 0:
        return "the stream ended without usage"
    if style.ignore_eos and result.output_tokens != request.max_tokens:
        return f"{result.output_tokens} tokens came, {request.max_tokens} were asked for"
    if isinstance(request.prompt, list) and not style.chat and result.prompt_tokens != request.prompt_tokens:
        return f"{result.prompt_tokens} prompt tokens were counted, {request.prompt_tokens} were sent"
    return None


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")

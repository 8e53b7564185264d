"""Sends one request of a load test and measures its stream."""

import time
from dataclasses import dataclass, field

import aiohttp
import msgspec

from loraserve.cli.failure import Failure, from_event, from_exception, from_status
from loraserve.cli.loadtest.plan import PlannedRequest
from loraserve.cli.loadtest.server_kind import ServerKind
from loraserve.cli.loadtest.stream import TAIL_BYTES, has_token, last_events

JSON_BODY = {"content-type": "application/json"}


@dataclass(slots=True)
class RequestResult:
    model: str
    sent_s: float
    """`time.perf_counter()` when it was sent; in an open loop the planned time, so that the wait of a late request
    counts."""
    late_s: float = 0.0
    """Delay of its sending after the planned time."""
    ttft_s: float | None = None
    """From `sent_s` to the first token's arrival."""
    e2e_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Times between chunks with tokens."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in the server's prefix cache; None if it does not report them."""
    output_tokens: int = 0
    failure: Failure | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.e2e_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestStyle:
    """Properties that all requests of a test share."""

    kind: ServerKind = ServerKind.LORASERVE
    chat: bool = False
    ignore_eos: bool = True
    """Applies only if the server supports it."""
    temperature: float = 0.0

    @property
    def path(self) -> str:
        """Below the server's URL."""
        return "v1/chat/completions" if self.chat else "v1/completions"

    @property
    def forces_length(self) -> bool:
        return self.ignore_eos and self.kind.can_ignore_eos

    def body(self, request: PlannedRequest) -> dict[str, object]:
        prompt = (
            {"messages": [{"role": "user", "content": request.prompt}]} if self.chat else {"prompt": request.prompt}
        )
        return {
            "model": request.model,
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **prompt,
            **self._length_fields(request),
        }

    def _length_fields(self, request: PlannedRequest) -> dict[str, object]:
        if not self.forces_length:
            return {}
        if self.kind is ServerKind.LORAX:
            return {"ignore_eos_token": True}
        return {"ignore_eos": True, "min_tokens": request.max_tokens}


async def send(
    client: aiohttp.ClientSession, style: RequestStyle, request: PlannedRequest, due_s: float | None = None
) -> RequestResult:
    """due_s: planned time by `time.perf_counter()`; None = now.

    Never raises for failures of the server or network: they are in the result.
    """
    now_s = time.perf_counter()
    sent_s = now_s if due_s is None else due_s
    result = RequestResult(request.model, sent_s, late_s=now_s - sent_s)
    try:
        body = msgspec.json.encode(style.body(request))
        async with client.post(style.path, data=body, headers=JSON_BODY, allow_redirects=False) as response:
            if response.status != 200:
                result.failure = from_status(response.status, await response.read())
                return result
            await _measure(response.content, result)
    except aiohttp.ClientError as error:
        result.failure = from_exception(error)
        return result
    result.failure = result.failure or _mismatch(result, request, style)
    return result


async def _measure(content: aiohttp.StreamReader, result: RequestResult) -> None:
    last_s: float | None = None
    tail = b""
    # Each HTTP chunk separately, even if several arrive together.
    async for chunk, _ in content.iter_chunks():
        now_s = time.perf_counter()
        # Usage and the end mark are the last two events, however they are cut.
        tail = tail[-TAIL_BYTES:] + chunk
        if not has_token(chunk):
            continue
        if last_s is None:
            result.ttft_s = now_s - result.sent_s
        else:
            result.gaps_s.append(now_s - last_s)
        last_s = now_s
    result.e2e_s = (last_s or time.perf_counter()) - result.sent_s
    for event in last_events(tail):
        if event.error:
            result.failure = from_event(event.error)
        elif event.usage:
            result.prompt_tokens, result.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens or 0
            details = event.usage.prompt_tokens_details
            result.cached_tokens = details.cached_tokens if details else None


def _mismatch(result: RequestResult, request: PlannedRequest, style: RequestStyle) -> Failure | None:
    """Without this check, a server that generates fewer tokens than requested would look fast."""
    if result.output_tokens == 0:
        return Failure("no usage", "the stream ended without usage")
    if style.forces_length and result.output_tokens != request.max_tokens:
        return Failure("tokens", f"{result.output_tokens} tokens arrived, {request.max_tokens} were requested")
    if isinstance(request.prompt, list) and not style.chat and result.prompt_tokens != request.prompt_tokens:
        sent = f"the server counted {result.prompt_tokens} prompt tokens, {request.prompt_tokens} were sent"
        return Failure("tokens", sent)
    return None

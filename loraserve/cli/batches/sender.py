"""Sends one request of a batch until it is answered, or as long as there is reason to try again."""

import asyncio
import time
from dataclasses import dataclass
from random import uniform
from uuid import uuid4

import aiohttp
import msgspec
from aiohttp import ClientResponse
from msgspec import Raw

from loraserve.cli.batches.batch_answer import BatchAnswer, BatchResponse
from loraserve.cli.batches.batch_requests import BatchRequest
from loraserve.cli.failure import MAX_MESSAGE, Failure, from_exception

JSON_BODY = {"content-type": "application/json"}
FIRST_WAIT_S = 0.5
"""Doubled each time, where the server does not say how long."""
MAX_WAIT_S = 8.0


@dataclass(frozen=True, slots=True)
class Sender:
    client: aiohttp.ClientSession
    model: str | None
    """In place of what requests say."""
    retry_for_s: float

    async def answer_to(self, request: BatchRequest) -> BatchAnswer:
        """Never raises for what the server or network does: the answer says so."""
        give_up_s = time.monotonic() + self.retry_for_s
        wait_s = FIRST_WAIT_S
        while True:
            attempt = await self._send(request)
            # Not all at once: those that were refused together would be refused together again.
            if attempt.retry_after_s is None:
                pause_s = uniform(0.5, 1) * wait_s
            else:
                pause_s = attempt.retry_after_s + uniform(0, FIRST_WAIT_S)
            if not attempt.may_pass or time.monotonic() + pause_s > give_up_s:
                return attempt.answer
            await asyncio.sleep(pause_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    async def _send(self, request: BatchRequest) -> "_Attempt":
        answer_id = f"batch_req_{uuid4().hex}"
        try:
            async with self.client.post(
                request.url.removeprefix("/"),
                data=request.content(self.model),
                headers=JSON_BODY,
                allow_redirects=False,
            ) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            return _Attempt(BatchAnswer(answer_id, request.custom_id, None, from_exception(error)))
        if _is_object(content):
            body = BatchResponse(response.status, response.headers.get("x-request-id", ""), Raw(content))
            answer = BatchAnswer(answer_id, request.custom_id, body)
        else:
            shown = content[:MAX_MESSAGE].decode(errors="replace")
            failure = Failure(f"HTTP {response.status} without JSON", shown)
            answer = BatchAnswer(answer_id, request.custom_id, None, failure)
        return _Attempt(answer, response.status, _retry_after(response))


@dataclass(frozen=True, slots=True)
class _Attempt:
    answer: BatchAnswer
    status: int | None = None
    """None: there was no response."""
    retry_after_s: float | None = None
    """That the server asks to wait."""

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be answered later."""
        return self.status is None or self.status in (408, 429) or self.status >= 500


def _retry_after(response: ClientResponse) -> float | None:
    """Seconds; a date, which proxies may send, counts for nothing."""
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def _is_object(content: bytes) -> bool:
    try:
        msgspec.json.decode(content, type=dict[str, Raw])
    except msgspec.DecodeError:
        return False
    return True

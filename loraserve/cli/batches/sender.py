"""Sends a request of a batch once, and turns the response into a line of the answers file."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from uuid import uuid4

import aiohttp
import msgspec
from aiohttp import ClientResponse, ClientTimeout
from msgspec import Raw

from loraserve.cli.batches.batch_answer import BatchAnswer, BatchResponse
from loraserve.cli.batches.batch_requests import BatchRequest
from loraserve.cli.failure import MAX_MESSAGE, Failure, from_exception

JSON_BODY = {"content-type": "application/json"}


class Trouble(Enum):
    """Why a request failed that may succeed later."""

    AWAY = "away"
    """No server answers, or none behind a proxy, or not in time."""
    REFUSED = "refused"
    """429: too many requests."""
    ERROR = "error"
    """Another server error, which this request may have caused."""


@dataclass(frozen=True, slots=True)
class Attempt:
    answer: BatchAnswer
    status: int | None = None
    """None = no response."""
    retry_after_s: float | None = None
    """The server's Retry-After."""

    @property
    def trouble(self) -> Trouble | None:
        """None = this is the final answer."""
        match self.status:
            case None | 408 | 502 | 503 | 504:
                return Trouble.AWAY
            case 429:
                return Trouble.REFUSED
            case status:
                return Trouble.ERROR if status >= 500 else None

    @property
    def has_no_key(self) -> bool:
        return self.status == 401


@dataclass(frozen=True, slots=True)
class Sender:
    client: aiohttp.ClientSession
    fields: Mapping[str, object]
    """They replace the requests' own."""
    timeout_s: float

    async def send(self, request: BatchRequest) -> Attempt:
        """Never raises for failures of the server or network: they are in the answer."""
        answer_id = f"batch_req_{uuid4().hex}"
        try:
            async with self.client.post(
                request.url.removeprefix("/"),
                data=request.content(self.fields),
                headers=JSON_BODY,
                allow_redirects=False,
                timeout=ClientTimeout(total=self.timeout_s),
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return Attempt(BatchAnswer(answer_id, request.custom_id, None, from_exception(error)))
        body = _one_line(content)
        if body is None:
            shown = content[:MAX_MESSAGE].decode(errors="replace")
            failure = Failure(f"HTTP {response.status} without a JSON object", shown)
            answer = BatchAnswer(answer_id, request.custom_id, None, failure)
        else:
            request_id = response.headers.get("x-request-id", "")
            answer = BatchAnswer(answer_id, request.custom_id, BatchResponse(response.status, request_id, Raw(body)))
        return Attempt(answer, response.status, _retry_after(response))


def _one_line(content: bytes) -> bytes | None:
    """Without line breaks, which indented JSON has; None if it is not a JSON object."""
    try:
        content.decode()
        msgspec.json.decode(content, type=dict[str, Raw])
        return msgspec.json.format(content, indent=-1)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return None


def _retry_after(response: ClientResponse) -> float | None:
    """Seconds; a date, which proxies may send, is ignored."""
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None

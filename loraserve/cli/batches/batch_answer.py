"""A line of the answers file, in the format of OpenAI's Batch API."""

import msgspec
from msgspec import Raw

from loraserve.cli.failure import Failure, from_status

OK = 200


class BatchResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    """The server's; empty if it sent none."""
    body: Raw


class BatchAnswer(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: BatchResponse | None
    error: Failure | None = None
    """Why there is no JSON response."""

    @property
    def failure(self) -> Failure | None:
        if self.response is None:
            return self.error or Failure("no response", "")
        status = self.response.status_code
        return None if status == OK else from_status(status, bytes(self.response.body))

"""How requests ended: one final state each, and the latest requests of each tenant."""

from collections.abc import Collection, Sequence
from enum import StrEnum

import msgspec

from loraserve.live.connection import LiveConnection
from loraserve.live.key_names import KeyNames

REQUEST_S = 3600
RECENT_REQUESTS = 5000
"""Approximate number kept per tenant."""
RECENT_S = 7 * 86_400
"""How long they are kept after the tenant's last request."""


class EndState(StrEnum):
    """Final state of a request."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    """By the client, an operator or a revocation."""
    FAILED = "failed"
    LOST = "lost"
    """Its process died."""


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    tenant: str
    state: EndState
    at: float
    """Unix time."""
    summary: msgspec.Raw = msgspec.Raw(b"{}")
    """JSON from the caller; never a prompt or an answer."""


class RecentRequest(msgspec.Struct, frozen=True, kw_only=True):
    position: str
    """For paging: pass the last position as `before`."""
    request: EndedRequest


class LiveRequests:
    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names
        self._decoder = msgspec.json.Decoder(EndedRequest)

    async def ended(self, tenant: str, request_id: str) -> EndedRequest | None:
        """None also if it is another tenant's. Raises LiveUnavailableError."""
        body = await self._connection.call("GET", self._names.request(request_id))
        if body is None:
            return None
        request = self._decoder.decode(body)
        return request if (request.tenant, request.request_id) == (tenant, request_id) else None

    async def have_ended(self, request_ids: Sequence[str]) -> set[str]:
        """Those of them that ended within the last hour. Raises LiveUnavailableError."""
        if not request_ids:
            return set()
        commands = [["EXISTS", self._names.request(request_id)] for request_id in request_ids]
        replies = await self._connection.call_many(commands)
        return {request_id for request_id, exists in zip(request_ids, replies, strict=True) if exists}

    async def recent(self, tenant: str, limit: int, before: str | None = None) -> list[RecentRequest]:
        """Newest first. Raises LiveUnavailableError."""
        end = "+" if before is None else f"({before}"
        entries = await self._connection.call(
            "XREVRANGE", self._names.recent_requests(tenant), end, "-", "COUNT", limit
        )
        found = [
            RecentRequest(position=position.decode(), request=self._decoder.decode(fields[1]))
            for position, fields in entries
        ]
        return [recent for recent in found if recent.request.tenant == tenant]

    async def forget(self, tenants: Collection[str]) -> None:
        """Removes the recent requests of erased tenants. Raises LiveUnavailableError."""
        if tenants:
            await self._connection.call("DEL", *map(self._names.recent_requests, tenants))

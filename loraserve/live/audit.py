"""Management actions, logins and refusals of the last weeks; `LiveDocuments.put` adds document changes by itself."""

import msgspec

from loraserve.live.connection import LiveConnection
from loraserve.live.key_names import KeyNames

NUM_ENTRIES = 100_000


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    """Unix time."""
    actor: str
    action: str
    """For example "alias.move" or "login.refused"."""
    tenant: str
    """The tenant concerned; "*" = the whole server."""
    request_id: str = ""
    kind: str = ""
    id: str = ""
    rev: int = 0
    detail: str = ""


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    position: str
    entry: AuditEntry


class LiveAudit:
    """Every method raises LiveUnavailableError."""

    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names
        self._decoder = msgspec.json.Decoder(AuditEntry)

    async def append(self, entry: AuditEntry) -> None:
        await self._connection.call(
            "XADD", self._names.audit(), "MAXLEN", "~", NUM_ENTRIES, "*", "v", msgspec.json.encode(entry)
        )

    async def read(self, limit: int, before: str | None = None) -> list[AuditRecord]:
        """Newest first, of all tenants. before: the last position of the previous page."""
        end = "+" if before is None else f"({before}"
        entries = await self._connection.call("XREVRANGE", self._names.audit(), end, "-", "COUNT", limit)
        return [
            AuditRecord(position=position.decode(), entry=self._decoder.decode(fields[1]))
            for position, fields in entries
        ]

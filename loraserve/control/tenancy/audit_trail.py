"""Who changed what, and which calls were refused. The changes themselves are read from the document revisions."""

import asyncio
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import asdict

from loraserve.control.paging import DEFAULT_PAGE, MAX_PAGE, Page, decode_cursor, encode_cursor, unknown_cursor
from loraserve.control.tenancy.principal import Action, Principal
from loraserve.control.unavailable import redis_required
from loraserve.live.audit import AuditEntry, AuditRecord
from loraserve.live.live_store import LiveStore
from loraserve.serving.errors import invalid_value
from loraserve.store.documents import DocumentStore
from loraserve.store.records import DocumentKind, adapter_id

SCANNED_AT_ONCE = 500
MAX_EXPORTED = 10_000
MAX_PAGE_BYTES = 4 << 20
"""As JSON, exceeded by at most one entry. The documents of an entry about a key for 1,000 adapters are 140 kB, so 500
such entries were 70 MB."""
POSITION = re.compile(r"(?!0+-0+\Z)[0-9]{1,19}-[0-9]{1,19}")
"""19 digits, because Redis accepts numbers below 2^64. Not 0-0: nothing precedes it, and Redis rejects the query."""
SECRETS = frozenset({"sha256", "previous_sha256", "kv_salt", "salt"})
"""Useless to readers, but of some use to an attacker who guesses."""
REFUSED = ".refused"
KINDS = frozenset(kind.value for kind in DocumentKind)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AuditQuery:
    actor: str | None = None
    action: str | None = None
    """Exact, or a prefix if it ends in a dot."""
    kind: str | None = None
    limit: int = DEFAULT_PAGE
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class AuditedAct:
    position: str
    entry: AuditEntry
    before: Json | None = None
    """The document before the change; None if there was none or the revision was pruned."""
    after: Json | None = None

    @property
    def was_refused(self) -> bool:
        return self.entry.action.endswith(REFUSED)


class AuditTrail:
    """Called on the event loop. Admins see their tenant's entries; a key for all tenants (`*`) sees all entries.

    A key restricted to some adapters does not see entries about others.

    Every method raises `ServingError`: 403, 503 while Redis is gone.
    """

    def __init__(self, live: LiveStore, documents: DocumentStore) -> None:
        self._live = live
        self._documents = documents

    async def list(self, principal: Principal, query: AuditQuery) -> Page[AuditedAct]:
        """Newest first, with the documents before and after. Fewer than requested if those documents are large."""
        if not 1 <= query.limit <= MAX_PAGE:
            raise invalid_value("limit", f"is {query.limit}; it must be 1 to {MAX_PAGE}.")
        found = await self._found(principal, query, query.limit + 1)
        page = await asyncio.to_thread(self._page, found[: query.limit])
        next_cursor = encode_cursor(page[-1].position) if len(found) > len(page) else None
        return Page(page, next_cursor)

    async def export(
        self, principal: Principal, query: AuditQuery, *, with_documents: bool = True
    ) -> "Iterator[AuditedAct]":
        """The newest 10,000 that match. Iterate on another thread: each item reads its documents from disk."""
        found = await self._found(principal, query, MAX_EXPORTED)
        return map(self._with_document if with_documents else _without_document, found)

    async def _found(self, principal: Principal, query: AuditQuery, count: int) -> "list[AuditRecord]":
        principal.require(Action.ADMINISTER)
        before = None if query.cursor is None else _position(query.cursor)
        found: list[AuditRecord] = []
        with redis_required():
            while len(found) < count:
                records = await self._live.audit.read(SCANNED_AT_ONCE, before)
                found += [record for record in records if _matches(principal, record.entry, query)]
                if len(records) < SCANNED_AT_ONCE:
                    break
                before = records[-1].position
        return found[:count]

    def _page(self, records: "Iterable[AuditRecord]") -> "list[AuditedAct]":
        """The first entries, until their documents reach `MAX_PAGE_BYTES`."""
        page: list[AuditedAct] = []
        size_bytes = 0
        for act in map(self._with_document, records):
            page.append(act)
            size_bytes += len(msgspec.json.encode((act.before, act.after)))
            if size_bytes >= MAX_PAGE_BYTES:
                break
        return page

    def _with_document(self, record: AuditRecord) -> AuditedAct:
        entry = record.entry
        if entry.rev == 0 or entry.kind not in KINDS:
            return _without_document(record)
        before, after = (self._shown(entry, rev) for rev in (entry.rev - 1, entry.rev))
        return AuditedAct(record.position, entry, before, after)

    def _shown(self, entry: AuditEntry, rev: int) -> Json | None:
        document = self._documents.revision(DocumentKind(entry.kind), entry.id, rev)
        if document is None:
            return None
        # All fields, including those that the file omits.
        return without_secrets(msgspec.to_builtins(asdict(document.doc)))


def _without_document(record: AuditRecord) -> AuditedAct:
    return AuditedAct(record.position, record.entry)


def without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_secrets(inner) for name, inner in value.items() if name not in SECRETS}
    return [without_secrets(inner) for inner in value] if isinstance(value, list) else value


def _matches(principal: Principal, entry: AuditEntry, query: AuditQuery) -> bool:
    return (
        (principal.is_any_tenant or entry.tenant == principal.tenant)
        and (
            entry.kind != DocumentKind.ADAPTER or principal.may_use(entry.id.removeprefix(adapter_id(entry.tenant, "")))
        )
        and (query.actor is None or entry.actor == query.actor)
        and (query.kind is None or entry.kind == query.kind)
        and (query.action is None or _is_action(entry.action, query.action))
    )


def _is_action(action: str, wanted: str) -> bool:
    return action.startswith(wanted) if wanted.endswith(".") else action == wanted


def _position(cursor: str) -> str:
    position = decode_cursor(cursor)
    if not POSITION.fullmatch(position):
        raise unknown_cursor()
    return position

"""Filters and order of adapter lists: state, text, tag, sort key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from loraserve.control.documents.adapter_edits import live_version
from loraserve.control.paging import DEFAULT_PAGE, Order, Value
from loraserve.control.usage.request_totals import AdapterKey
from loraserve.control.usage.traffic import NO_TRAFFIC, AdapterTraffic
from loraserve.store.records import AdapterDoc, Document

NOTHING_USED: Mapping[AdapterKey, AdapterTraffic] = MappingProxyType({})


class AdapterState(StrEnum):
    READY = "ready"
    DISABLED = "disabled"
    EMPTY = "empty"
    """No version yet."""
    OTHER_BASE = "other_base"
    """Its live version was made for another base model than the served one."""
    DRAINING = "draining"
    """Deleted, but requests still run or an engine still has it."""
    DELETED = "deleted"


class AdapterSort(StrEnum):
    """A minus means largest or newest first. Ties are in order of names."""

    NAME = "name"
    NAME_DOWN = "-name"
    SIZE = "size"
    """Of the live version."""
    LARGEST = "-size"
    CREATED = "created_at"
    NEWEST = "-created_at"
    UPDATED = "updated_at"
    LAST_UPDATED = "-updated_at"
    REQUESTS = "requests"
    """In the last 24 hours."""
    MOST_REQUESTS = "-requests"
    LAST_USED = "last_used"
    """An adapter that was never used counts as the oldest."""
    LATEST_USED = "-last_used"


@dataclass(frozen=True, slots=True)
class AdapterQuery:
    q: str = ""
    """Part of the name or the description, case ignored."""
    tag: str | None = None
    state: AdapterState | None = None
    """None = all but deleted ones."""
    sort: AdapterSort = AdapterSort.NAME
    limit: int = DEFAULT_PAGE
    cursor: str | None = None

    def matches(self, document: Document[AdapterDoc], state_of: Callable[[Document[AdapterDoc]], AdapterState]) -> bool:
        doc = document.doc
        if self.tag is not None and self.tag not in doc.tags:
            return False
        part = self.q.casefold()
        if part and part not in doc.name.casefold() and part not in doc.description.casefold():
            return False
        return doc.deleted_at is None if self.state is None else state_of(document) is self.state


ALL_ADAPTERS = AdapterQuery()
"""Except deleted ones."""


def order_of(sort: AdapterSort, traffic: Mapping[AdapterKey, AdapterTraffic]) -> Order[Document[AdapterDoc]]:

    def of(document: Document[AdapterDoc]) -> AdapterTraffic:
        return traffic.get((document.doc.tenant, document.doc.name), NO_TRAFFIC)

    values: dict[str, Callable[[Document[AdapterDoc]], Value]] = {
        AdapterSort.NAME: lambda document: document.doc.name,
        AdapterSort.SIZE: lambda document: _live_size_bytes(document.doc),
        AdapterSort.CREATED: lambda document: document.doc.created_at,
        AdapterSort.UPDATED: lambda document: document.at,
        AdapterSort.REQUESTS: lambda document: of(document).num_requests,
        AdapterSort.LAST_USED: lambda document: of(document).last_used_at or 0.0,
    }
    return Order(f"adapters by {sort}", values[sort.removeprefix("-")], _name_and_tenant, is_down=sort.startswith("-"))


def _name_and_tenant(document: Document[AdapterDoc]) -> str:
    return f"{document.doc.name} {document.doc.tenant}"


def _live_size_bytes(doc: AdapterDoc) -> int:
    live = live_version(doc)
    return 0 if live is None else live.size_bytes

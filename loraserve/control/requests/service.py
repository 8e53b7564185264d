"""Lists, looks up and ends requests, whichever server they run on."""

import asyncio
import re
from dataclasses import dataclass

from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.tenant_edits import tenant_not_found
from loraserve.control.paging import DEFAULT_PAGE, MAX_PAGE, Page, decode_cursor, encode_cursor, unknown_cursor
from loraserve.control.requests.records import record_of_ended
from loraserve.control.requests.snapshot_records import RequestRecord, RequestState
from loraserve.control.requests.snapshots import Snapshots
from loraserve.control.tenancy.principal import Action, Principal
from loraserve.control.unavailable import redis_required
from loraserve.live.live_store import LiveStore
from loraserve.live.requests import RecentRequest
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.records import ANY_TENANT

SCANNED_AT_ONCE = 250
REPORT_TRIES = 10
REPORT_TRY_EVERY_S = 0.2
"""Servers report what they run once a second; a slow one may take longer."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
RUNNING_CURSOR = re.compile(r"run:(?P<at>[0-9]{1,19}(?:\.[0-9]{1,19})?):(?P<id>.{1,128})")
ENDED_CURSOR = re.compile(r"end:(?P<position>(?!0+-0+:)[0-9]{1,19}-[0-9]{1,19}):(?P<tenant>.{1,128})")
"""19 digits, because Redis accepts numbers below 2^64. Not 0-0: nothing precedes it, and Redis rejects the query."""


@dataclass(frozen=True, slots=True)
class RequestQuery:
    adapter: str | None = None
    """"" = the base model."""
    state: RequestState | None = None
    key_id: str | None = None
    tenant: str | None = None
    """With a key for all tenants (`*`): another tenant, or `ANY_TENANT`. None = the acting tenant."""
    limit: int = DEFAULT_PAGE
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """The item after which a page begins."""

    running: tuple[float, str] | None
    """(arrival, id) among the running requests; None = all of them were on earlier pages."""
    ended: tuple[str, str] | None
    """(position, tenant) among the ended requests; None = from the newest on."""


class RequestService:
    """Called on the event loop. Another tenant's requests do not exist for a principal.

    Every method raises `ServingError`, 503 while Redis is gone.
    """

    def __init__(self, catalog: Catalog, live: LiveStore, snapshots: Snapshots) -> None:
        self._catalog = catalog
        self._live = live
        self._snapshots = snapshots

    async def list(self, principal: Principal, query: RequestQuery) -> Page[RequestRecord]:
        """Running requests, newest first, and those whose end Redis may not know yet; then the other ended ones, latest
        end first: about the last 5,000 of each tenant."""
        if not 1 <= query.limit <= MAX_PAGE:
            raise invalid_value("limit", f"is {query.limit}; it must be 1 to {MAX_PAGE}.")
        place = _Place((float("inf"), ""), None) if query.cursor is None else _place_of(query.cursor)
        tenants = self._tenants(principal, query.tenant)
        with redis_required():
            found: list[tuple[str, RequestRecord]] = []
            listed: set[str] = set()
            if place.running is not None:
                running = [record for record in await self._running(tenants) if _matches(principal, record, query)]
                listed = {record.id for record in running}
                found = [
                    (f"run:{record.at}:{record.id}", record)
                    for record in running
                    if (-record.at, record.id) > (-place.running[0], place.running[1])
                ]
            if len(found) <= query.limit and query.state is not RequestState.RUNNING:
                # Redis may know by now how some of those ended that are on this page or an earlier one.
                ended = await self._ended(principal, query, tenants, place.ended, query.limit + 1 + len(listed))
                found += [(cursor, record) for cursor, record in ended if record.id not in listed]
        page = found[: query.limit]
        next_cursor = encode_cursor(page[-1][0]) if len(found) > query.limit else None
        return Page([record for _, record in page], next_cursor)

    async def get(self, principal: Principal, request_id: str) -> RequestRecord:
        """Raises `ServingError` (404), also for a request that ended too long ago."""
        record = await self._find(principal, request_id)
        if record is None or not _may_see(principal, record):
            raise _not_found(request_id)
        return record

    async def abort(self, principal: Principal, request_id: str) -> None:
        """The request ends within a few seconds, wherever it runs; does nothing if it is over."""
        principal.require(Action.OPERATE)
        record = await self.get(principal, request_id)
        if record.state is not RequestState.RUNNING or self._snapshots.abort_own(request_id):
            return
        with redis_required():
            for process, records in (await self._snapshots.requests()).items():
                if any(running.id == request_id for running in records):
                    await self._live.aborts.request(process, request_id)

    def _tenants(self, principal: Principal, tenant: str | None) -> "list[str]":
        if tenant is None or tenant == principal.acting_tenant:
            return [principal.acting_tenant]
        if not principal.is_any_tenant:
            message = "'tenant' names a tenant other than your key's. Only a key for all tenants ('*') may do that."
            raise ServingError(ErrorCode.FORBIDDEN, message, param="tenant")
        if tenant == ANY_TENANT:
            return sorted(document.id for document in self._catalog.all_tenants())
        if self._catalog.tenant(tenant) is None:
            raise tenant_not_found(tenant, "tenant")
        return [tenant]

    async def _running(self, tenants: "list[str]") -> "list[RequestRecord]":
        of_tenants = frozenset(tenants)
        by_process = (await self._snapshots.requests()).values()
        found = [record for records in by_process for record in records if record.tenant in of_tenants]
        return sorted(found, key=lambda record: (-record.at, record.id))

    async def _ended(
        self,
        principal: Principal,
        query: RequestQuery,
        tenants: "list[str]",
        after: tuple[str, str] | None,
        count: int,
    ) -> "list[tuple[str, RequestRecord]]":
        """The newest `count` that match, with their cursors, from all tenants' lists merged."""
        found: list[tuple[tuple[int, int], str, str, RequestRecord]] = []
        for tenant in tenants:
            before = None if after is None else _before(after, tenant)
            num_found = 0
            while num_found < count:
                recents = await self._live.requests.recent(tenant, SCANNED_AT_ONCE, before)
                for recent in recents:
                    record = record_of_ended(recent.request)
                    if record is not None and _matches(principal, record, query):
                        num_found += 1
                        found.append((_newest_first(recent), tenant, recent.position, record))
                if len(recents) < SCANNED_AT_ONCE:
                    break
                before = recents[-1].position
        found.sort(key=lambda entry: entry[:2])
        return [(f"end:{position}:{tenant}", record) for _, tenant, position, record in found[:count]]

    async def _find(self, principal: Principal, request_id: str) -> RequestRecord | None:
        if not REQUEST_ID.fullmatch(request_id):
            return None
        tenant = principal.acting_tenant
        with redis_required():
            for num_left in reversed(range(REPORT_TRIES)):
                # NOTE: before the search, so that a request that ends meanwhile is found as ended.
                is_in_flight = await self._live.leases.is_in_flight(tenant, request_id)
                for record in await self._running([tenant]):
                    if record.id == request_id:
                        return record
                ended = await self._live.requests.ended(tenant, request_id)
                if ended is not None:
                    return record_of_ended(ended)
                if not is_in_flight or num_left == 0:
                    break
                # Its client knows its id already, but the server that runs it has not reported it yet.
                await asyncio.sleep(REPORT_TRY_EVERY_S)
            return await self._find_older(tenant, request_id)

    async def _find_older(self, tenant: str, request_id: str) -> RequestRecord | None:
        before: str | None = None
        while recents := await self._live.requests.recent(tenant, SCANNED_AT_ONCE, before):
            for recent in recents:
                if recent.request.request_id == request_id:
                    return record_of_ended(recent.request)
            before = recents[-1].position
        return None


def _matches(principal: Principal, record: RequestRecord, query: RequestQuery) -> bool:
    return (
        _may_see(principal, record)
        and (query.adapter is None or query.adapter == (record.adapter or ""))
        and (query.state is None or query.state is record.state)
        and (query.key_id is None or query.key_id == record.key_id)
    )


def _may_see(principal: Principal, record: RequestRecord) -> bool:
    is_own = principal.is_any_tenant or record.tenant == principal.acting_tenant
    return is_own and (record.adapter is None or principal.may_use(record.adapter))


def _place_of(cursor: str) -> _Place:
    text = decode_cursor(cursor)
    if found := RUNNING_CURSOR.fullmatch(text):
        return _Place((float(found["at"]), found["id"]), None)
    if found := ENDED_CURSOR.fullmatch(text):
        return _Place(None, (found["position"], found["tenant"]))
    raise unknown_cursor()


def _newest_first(recent: RecentRequest) -> tuple[int, int]:
    milliseconds, sequence = recent.position.split("-")
    return -int(milliseconds), -int(sequence)


def _before(after: tuple[str, str], tenant: str) -> str:
    """Entries of several tenants can have the same position: those of later tenants are still to be listed."""
    position, last_tenant = after
    if tenant <= last_tenant:
        return position
    milliseconds, sequence = position.split("-")
    return f"{milliseconds}-{int(sequence) + 1}"


def _not_found(request_id: str) -> ServingError:
    message = f"The request '{request_id[:128]}' is not known, or ended too long ago."
    return ServingError(ErrorCode.NOT_FOUND, message)

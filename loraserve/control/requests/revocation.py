"""Ends requests that run for a key, tenant or adapter that may no longer be used."""

import asyncio
import time
from collections.abc import Callable

from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.tenant_edits import tenant_deleted
from loraserve.control.requests.draining import adapter_deleted
from loraserve.control.requests.running import RunningRequest, RunningRequests
from loraserve.control.tenancy.authenticator import Authenticator, check_not_suspended
from loraserve.serving.errors import ServingError
from loraserve.store.records import AnyDocument

CHECK_EVERY_S = 1.0


class Revocation:
    """Called on the event loop; start `run` as a task. A document applies to running streams within a second of its
    arrival here, and so do the effects of time (an expiry, the end of a drain)."""

    def __init__(
        self,
        catalog: Catalog,
        authenticator: Authenticator,
        running: RunningRequests,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._catalog = catalog
        self._authenticator = authenticator
        self._running = running
        self._clock = clock
        self._changed = asyncio.Event()
        catalog.subscribe(self._on_change)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._changed.clear()
            self.check()
            try:
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def check(self) -> None:
        """Abort every running request that would not be admitted now, with the error it would get."""
        for request in self._running:
            error = self._verdict(request)
            if error is not None:
                request.abort(error)

    def _verdict(self, request: RunningRequest) -> ServingError | None:
        if self._catalog.is_deleted(request.tenant):
            return tenant_deleted(request.tenant)
        try:
            self._authenticator.current(request.principal)
            check_not_suspended(self._catalog, request.tenant)
        except ServingError as error:
            return error
        return self._deleted(request)

    def _deleted(self, request: RunningRequest) -> ServingError | None:
        """Deleted versions and moved aliases do not matter: a request ends on the version it began with."""
        adapter = request.target.adapter
        document = self._catalog.adapter(adapter.tenant, adapter.name) if adapter is not None else None
        if document is None or document.doc.deleted_at is None:
            return None
        drain_until = document.doc.drain_until or document.doc.deleted_at
        return adapter_deleted(document.doc.name) if self._clock() >= drain_until else None

    def _on_change(self, document: AnyDocument) -> None:
        self._changed.set()

"""Records refused calls in the audit trail, but not so often that a flood of them displaces everything else."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable

from loraserve.control.background import Tasks
from loraserve.live.audit import AuditEntry
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.live_store import LiveStore
from loraserve.serving.errors import ErrorCode

DEDUPLICATE_S = 60.0
"""The same refusal of the same actor is recorded once in this time."""
MAX_PER_HOUR = 120
"""For all strangers together, and for each tenant: about 3,000 a day, of the trail's 100,000 entries."""
HOUR_S = 3600.0
MAX_REMEMBERED = 4096
MAX_SUBJECT_CHARACTERS = 256
UNKNOWN_ACTOR = "unknown"
"""A stranger: a caller without a valid key."""

Refusal = tuple[str, str, str]


class Refusals:
    """Called on the event loop. Nothing waits for the write; if Redis is gone, the entry is lost."""

    def __init__(self, live: LiveStore, *, steady: Callable[[], float] = time.monotonic) -> None:
        self._live = live
        self._steady = steady
        self._noted: OrderedDict[Refusal, float] = OrderedDict()
        self._noted_of: dict[str, deque[float]] = {}
        """Times of the latest entries, for strangers and by tenant."""
        self._writing = Tasks()

    def note(
        self, *, actor: str, tenant: str, address: str, subject: str, kind: str, code: ErrorCode, request_id: str
    ) -> None:
        """subject: the call, such as "DELETE /v1/keys/abc". address: the client's; it identifies strangers."""
        who, of = (address, UNKNOWN_ACTOR) if actor == UNKNOWN_ACTOR else (actor, tenant)
        if not self._is_due((who, subject, code), of):
            return
        entry = AuditEntry(
            at=time.time(),
            actor=actor,
            action=f"{kind}.refused",
            tenant=tenant,
            request_id=request_id,
            kind=kind,
            id=subject[:MAX_SUBJECT_CHARACTERS],
            detail=f"{address}: {code}",
        )
        self._writing.start(self._append(entry))

    async def close(self) -> None:
        """Wait for writes in flight."""
        await self._writing.wait()

    def _is_due(self, refusal: Refusal, of: str) -> bool:
        now = self._steady()
        latest = self._noted_of.setdefault(of, deque(maxlen=MAX_PER_HOUR))
        noted_at = self._noted.get(refusal)
        if len(latest) == MAX_PER_HOUR and now - latest[0] < HOUR_S:
            return False
        if noted_at is not None and now - noted_at < DEDUPLICATE_S:
            return False
        latest.append(now)
        self._noted[refusal] = now
        self._noted.move_to_end(refusal)
        while len(self._noted) > MAX_REMEMBERED:
            self._noted.popitem(last=False)
        return True

    async def _append(self, entry: AuditEntry) -> None:
        try:
            await self._live.audit.append(entry)
        except LiveUnavailableError:
            return

"""Reports to Redis how requests ended, and repeats what it missed while it was gone."""

import logging

from loraserve.live.admission import LiveAdmission
from loraserve.live.admission_records import FinishCall
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.requests import EndedRequest

MAX_UNSETTLED = 10_000
"""About 10 MB. Above it, the oldest count as lost once this process has ended, though they were billed."""

logger = logging.getLogger(__name__)


class Settlements:
    """Called on the event loop."""

    def __init__(self, live: LiveAdmission) -> None:
        self._live = live
        self._unsettled: dict[str, FinishCall] = {}
        """By request id, oldest first."""

    def unsettled(self) -> list[EndedRequest]:
        """Ended requests that Redis missed."""
        return [call.request for call in self._unsettled.values()]

    async def settle(self, call: FinishCall) -> bool:
        """False: Redis is gone; `retry` will report it. Reporting it twice does no harm."""
        request_id = call.lease.request_id
        try:
            await self._live.finish(call)
        except LiveUnavailableError as error:
            logger.info("request %s could not be settled in Redis yet: %s", request_id, error)
            self._unsettled[request_id] = call
            if len(self._unsettled) > MAX_UNSETTLED:
                del self._unsettled[next(iter(self._unsettled))]
            return False
        self._unsettled.pop(request_id, None)
        return True

    async def retry(self) -> None:
        """Continues as long as Redis answers."""
        for call in [*self._unsettled.values()]:
            if not await self.settle(call):
                return

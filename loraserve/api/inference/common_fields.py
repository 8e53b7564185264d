"""Fields that mean the same in every inference request."""

from dataclasses import dataclass

from loraserve.api.http.ranges import INT32, check_one_of, check_range
from loraserve.api.schemas.inputs import PooledFields
from loraserve.api.schemas.sampling import SamplingFields

MAX_SALT_CHARS = 256
TIERS = {"auto": 0, "default": 0, "flex": 1, "priority": -1}
"""The priorities of OpenAI's service tiers."""


@dataclass(frozen=True, slots=True)
class CommonFields:
    cache_salt: str = ""
    priority: int = 0
    """See `EngineRequest.priority`."""


def checked_fields(request: SamplingFields | PooledFields) -> CommonFields:
    """Raises `ServingError`."""
    cache_salt, priority = request.cache_salt, request.priority
    if isinstance(request, SamplingFields) and request.service_tier is not None:
        check_one_of("service_tier", request.service_tier, TIERS)
        priority = TIERS[request.service_tier] if priority is None else priority
    if cache_salt is not None:
        check_range("cache_salt", len(cache_salt), 1, MAX_SALT_CHARS)
    if priority is not None:
        check_range("priority", priority, -INT32, INT32 - 1)
    return CommonFields(cache_salt or "", priority or 0)

"""How often each tenant used each content here, so that no tenant is shown another's use."""

from dataclasses import dataclass

MAX_USES = 65_536
"""Pairs of tenant and content whose use is remembered; the least recently used are dropped first."""


@dataclass(frozen=True, slots=True)
class Use:
    num_hits: int = 0
    """Requests since the start of this process."""
    last_used_at: float | None = None
    """Unix time."""


class ContentUses:
    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], Use] = {}
        """By tenant and digest."""

    def count(self, tenant: str, digest: str, now: float) -> None:
        before = self._uses.pop((tenant, digest), Use())
        self._uses[tenant, digest] = Use(before.num_hits + 1, now)
        while len(self._uses) > MAX_USES:
            del self._uses[next(iter(self._uses))]

    def of(self, tenant: str, digest: str) -> Use:
        return self._uses.get((tenant, digest), Use())

"""Which adapters have a name. In-process here; the seam is what a shared registry will implement."""

import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """A name bound to content. A request holds on to the digest it resolved, whatever happens to the name."""

    name: str
    digest: str
    max_lora_rank: int
    size_bytes: int
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time."""


class AdapterRegistry(Protocol):
    def resolve(self, name: str) -> ResolvedAdapter | None: ...

    def list(self) -> list[ResolvedAdapter]:
        """Oldest first."""
        ...

    def add(self, adapter: ResolvedAdapter) -> None:
        """Make it visible, in place of an adapter of the same name."""
        ...

    def remove(self, name: str) -> ResolvedAdapter | None:
        """Make it invisible; None if it was not there."""
        ...

    def has_digest(self, digest: str) -> bool:
        """Whether any name stands for this content."""
        ...


class InProcessRegistry:
    """Forgets everything with the process."""

    def __init__(self) -> None:
        self._adapters: dict[str, ResolvedAdapter] = {}
        self._num_names: Counter[str] = Counter()

    def resolve(self, name: str) -> ResolvedAdapter | None:
        return self._adapters.get(name)

    def list(self) -> list[ResolvedAdapter]:
        return [*self._adapters.values()]

    def add(self, adapter: ResolvedAdapter) -> None:
        self.remove(adapter.name)
        self._adapters[adapter.name] = adapter
        self._num_names[adapter.digest] += 1

    def remove(self, name: str) -> ResolvedAdapter | None:
        adapter = self._adapters.pop(name, None)
        if adapter is not None:
            self._num_names[adapter.digest] -= 1
            if self._num_names[adapter.digest] == 0:
                del self._num_names[adapter.digest]
        return adapter

    def has_digest(self, digest: str) -> bool:
        return digest in self._num_names

"""References to adapters: bound to a request's content, and the current content of each name."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BoundAdapter:
    """A name bound to content. A request keeps the digest it was admitted with, whatever happens to the name."""

    name: str
    """For messages to the client."""
    label: str
    """For metrics; includes the tenant, unless it is a built-in one."""
    digest: str


@dataclass(frozen=True, slots=True)
class NamedContent:
    """The content that an adapter's bare name refers to now."""

    label: str
    digest: str
    size_bytes: int


class AdapterNames(Protocol):
    """The existing adapters, for metrics."""

    def contents(self) -> list[NamedContent]:
        """Contents of all usable adapters, in any order."""
        ...

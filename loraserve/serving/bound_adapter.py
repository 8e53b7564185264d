"""An adapter as a request holds on to it."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BoundAdapter:
    """A name bound to content. A request keeps the digest it was admitted with, whatever happens to the name."""

    name: str
    """For messages to the client."""
    label: str
    """For metrics: also says whose it is, where names of several tenants may meet."""
    digest: str


@dataclass(frozen=True, slots=True)
class NamedContent:
    """What an adapter's bare name means now."""

    label: str
    digest: str
    size_bytes: int


class AdapterNames(Protocol):
    """What metrics need to know of the adapters there are."""

    def contents(self) -> list[NamedContent]:
        """Of every adapter that can be used, in any order."""
        ...

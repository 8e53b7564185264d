"""`AdapterNames` for tests that have no control plane."""

from dataclasses import dataclass, field

from loraserve.serving.bound_adapter import NamedContent


@dataclass
class NamedAdapters:
    found: list[NamedContent] = field(default_factory=list)

    def contents(self) -> list[NamedContent]:
        return self.found


class NoAdapters(NamedAdapters):
    pass

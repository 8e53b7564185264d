"""Keeps the number of values of the `adapter` metric label small, however many adapters there are."""

OTHER = "other"
MAX_LABELS = 50


class AdapterLabels:
    """The first `MAX_LABELS` names that are used keep their own label until released; the rest share `other`.

    Labels never move between names: a counter that changed its meaning would read as a reset.
    """

    def __init__(self, max_labels: int = MAX_LABELS) -> None:
        self._max_labels = max_labels
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        if name in self._names:
            return name
        if len(self._names) >= self._max_labels:
            return OTHER
        self._names.add(name)
        return name

    def release(self, name: str) -> bool:
        """Free the label of an adapter that is gone. True if it had one, whose series are now to be removed."""
        if name not in self._names:
            return False
        self._names.remove(name)
        return name != OTHER

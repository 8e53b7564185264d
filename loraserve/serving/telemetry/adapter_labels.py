"""Keeps the number of values of the `adapter` metric label small, however many adapters there are."""

OTHER = "other"
MAX_LABELS = 50


class AdapterLabels:
    """The first `MAX_LABELS` names used keep their own label until released; the rest share `other`.

    Labels never move between names: a counter that changed its meaning would look like a reset.
    """

    def __init__(self, max_labels: int = MAX_LABELS) -> None:
        self._max_labels = max_labels
        self._num_users: dict[str, int] = {}

    def acquire(self, name: str) -> str:
        """For a request, until it calls `leave` with the returned label."""
        if name not in self._num_users:
            if len(self._num_users) >= self._max_labels:
                return OTHER
            self._num_users[name] = 0
        self._num_users[name] += 1
        return name

    def leave(self, label: str) -> None:
        if label in self._num_users:
            self._num_users[label] -= 1

    def release(self, name: str) -> bool:
        """Free the label of a deleted adapter, unless requests use it. True if its series are to be removed."""
        if self._num_users.get(name, 1) > 0:
            return False
        del self._num_users[name]
        return name != OTHER

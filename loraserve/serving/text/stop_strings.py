"""Finds stop strings in text that arrives in pieces; never emits text that may turn out to be part of one."""


class StopMatcher:
    """The outcome depends only on the text, not on how it was cut into pieces.

    The match that completes first wins; of two that end together, the longer one.
    """

    __slots__ = ("_held", "_include_stop", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is safe to show. Once `matched` is set, it ends at the stop string and nothing follows."""
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            start, stop = found
            self._held, self.matched = "", stop
            return text[: start + len(stop)] if self._include_stop else text[:start]
        num_held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def release(self, text: str = "") -> str:
        """Return the held text followed by `text`, without searching."""
        text, self._held = self._held + text, ""
        return text

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    first = stop[:1]
    start = text.find(first, max(len(text) - len(stop) + 1, 0))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(first, start + 1)
    return 0

"""First-fit extents of one flat tensor, with coalescing."""

from bisect import insort


class Extents:
    """Free space of `size` units as sorted, non-adjacent (start, size) pairs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self._free)

    def try_allocate(self, size: int) -> int | None:
        """Start of the lowest free extent that is large enough, or None."""
        for i, (start, free_size) in enumerate(self._free):
            if free_size >= size:
                if free_size == size:
                    del self._free[i]
                else:
                    self._free[i] = (start + size, free_size - size)
                return start
        return None

    def free(self, start: int, size: int) -> None:
        assert 0 <= start <= self.size - size, f"extent [{start}, {start + size}) is outside the arena"
        insort(self._free, (start, size))
        merged: list[tuple[int, int]] = []
        for start_i, size_i in self._free:
            if merged and merged[-1][0] + merged[-1][1] == start_i:
                merged[-1] = (merged[-1][0], merged[-1][1] + size_i)
            else:
                assert not merged or merged[-1][0] + merged[-1][1] < start_i, "an extent was freed twice"
                merged.append((start_i, size_i))
        self._free = merged

    def cheapest_span(self, size: int) -> tuple[int, int]:
        """(start, end) from one free extent to another, with `size` free in total and as little as possible in use
        between them.

        Requires that much free space.
        """
        spans: list[tuple[int, int, int]] = []
        first = num_free = 0
        for start, free_size in self._free:
            num_free += free_size
            while num_free - self._free[first][1] >= size:
                num_free -= self._free[first][1]
                first += 1
            if num_free >= size:
                span_start, end = self._free[first][0], start + free_size
                spans.append((end - span_start - num_free, span_start, end))
        _, start, end = min(spans)
        return start, end

    def join(self, start: int, end: int) -> None:
        """Record that what was in use in the span is now at its start, and what was free is one extent at its end."""
        num_free = sum(size for free_start, size in self._free if start <= free_start < end)
        others = [extent for extent in self._free if not start <= extent[0] < end]
        self._free = sorted([*others, (end - num_free, num_free)])

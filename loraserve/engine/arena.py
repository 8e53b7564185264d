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

    def reset(self, num_used: int) -> None:
        """Everything from `num_used` on is free: the state after compaction."""
        self._free = [(num_used, self.size - num_used)] if num_used < self.size else []

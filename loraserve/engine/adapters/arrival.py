"""Adapters whose copies to a GPU are all queued: a step that uses one may begin, and waits when it needs a part."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loraserve.engine.device.accelerator import Copies, Event

FIRST_PART_BYTES = 2 << 20
"""About one layer of rank 16 of an 8B model: the first layer waits for no more than this."""
LARGEST_PART_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class CopyParts:
    """A packed payload, cut at the ends of some of its groups."""

    ends: tuple[int, ...]
    """In bytes, ascending; the last one is the payload's size."""
    part_of_group: tuple[int, ...]
    """By group of the model: the part with the last byte of this and all earlier groups; -1 = they have no data."""


def copy_parts(group_starts: np.ndarray, size_bytes: int, element_bytes: int) -> CopyParts:
    """group_starts: from the `PackedTable`; groups are packed in the order in which the model computes them.

    The least size of a part doubles up to `LARGEST_PART_BYTES`: for a long prompt, computing a layer takes longer than
    copying its part, and every part costs the host some calls.
    """
    present = [group for group, offset in enumerate(group_starts.tolist()) if offset >= 0]
    starts = [int(group_starts[group]) * element_bytes for group in present]
    group_ends = dict(zip(present, [*starts[1:], size_bytes], strict=False))
    ends: list[int] = []
    part_of_group: list[int] = []
    latest, least = -1, FIRST_PART_BYTES
    for group in range(len(group_starts)):
        end = group_ends.get(group)
        if end is not None:
            latest = len(ends)
            if end == size_bytes or end - (ends[-1] if ends else 0) >= least:
                ends.append(end)
                least = min(2 * least, LARGEST_PART_BYTES)
        part_of_group.append(latest)
    return CopyParts(tuple(ends) or (size_bytes,), tuple(part_of_group))


class Arrival:
    """One adapter's copies, on the side stream. Only the main stream waits for them; the host goes on."""

    def __init__(self, copies: Copies, parts: CopyParts, copied: Sequence[Event]) -> None:
        """copied: an event after each part."""
        self._copies = copies
        self._parts = parts
        self._copied = copied
        self._num_waited = 0

    @property
    def is_waited(self) -> bool:
        """Whether work queued from now on runs after all of its copies."""
        return self._num_waited == len(self._copied)

    @property
    def last(self) -> Event:
        """The event after its last part."""
        return self._copied[-1]

    def before_group(self, group_index: int) -> None:
        """Work queued from now on runs after the matrices of this group, and of all earlier ones, have arrived."""
        self._wait(self._parts.part_of_group[group_index])

    def before_all(self) -> None:
        self._wait(len(self._copied) - 1)

    def _wait(self, part: int) -> None:
        if part >= self._num_waited:
            self._copies.wait_for(self._copied[part])
            self._num_waited = part + 1


class StepArrivals:
    """The arrivals of the adapters in one step."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals

    def before_group(self, group_index: int) -> None:
        """As `Arrival.before_group`, for every adapter."""
        for arrival in self._arrivals:
            arrival.before_group(group_index)

    def before_all(self) -> None:
        for arrival in self._arrivals:
            arrival.before_all()

"""Slots for recurrent states: one for each running sequence, the others for states that other sequences may continue.

A slot is free, held (by a sequence, or to save a state in) or saved: the state after a block, found by that block's
hash and evicted least recently used first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from loraserve.engine.kv.blocks import BlockHash


class StatePool:
    """Hands out slots 0 to num_slots - 1. Knows nothing of sequences or tensors."""

    def __init__(self, num_slots: int, max_num_seqs: int) -> None:
        """max_num_seqs: slots that sequences may hold at once; always available to them."""
        assert num_slots >= max_num_seqs, "every running sequence needs a state"
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: low slots first, so untouched memory stays untouched
        self._slot_of: OrderedDict[BlockHash, int] = OrderedDict()  # saved ones, least recently used first
        self._max_num_seqs = max_num_seqs
        self._num_sequences = 0
        self.num_ever_allocated = 0
        """Slots from this one on were never handed out."""

    def enter(self) -> int:
        """A slot for a sequence that starts to run."""
        self._num_sequences += 1
        assert self._num_sequences <= self._max_num_seqs, "more sequences than slots are reserved for"
        return self._take()

    def leave(self, slot: int) -> None:
        """Free a sequence's slot."""
        self._num_sequences -= 1
        self._free.append(slot)

    def try_allocate(self) -> int | None:
        """A slot to save a state in; None if sequences may soon need all that are available."""
        if len(self._free) + len(self._slot_of) <= self._max_num_seqs - self._num_sequences:
            return None
        return self._take()

    def save(self, block: BlockHash, slot: int) -> None:
        """Make the state in an allocated slot findable as the state after this block."""
        self.forget(block)
        self._slot_of[block] = slot

    def give_back(self, slot: int) -> None:
        """Free an allocated slot, in which nothing was saved."""
        self._free.append(slot)

    def forget(self, block: BlockHash) -> None:
        """A no-op if no state after this block is saved."""
        slot = self._slot_of.pop(block, None)
        if slot is not None:
            self._free.append(slot)

    def num_blocks_to_skip(self, hashes: Sequence[BlockHash]) -> int:
        """How many of these first blocks of a sequence need not be computed, because the state after them is saved."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in self._slot_of), 0)

    def use(self, block: BlockHash) -> int:
        """The slot of a saved state, which becomes the most recently used."""
        self._slot_of.move_to_end(block)
        return self._slot_of[block]

    def _take(self) -> int:
        if self._free:
            slot = self._free.pop()
            self.num_ever_allocated = max(self.num_ever_allocated, slot + 1)
            return slot
        return self._slot_of.popitem(last=False)[1]

    def check_invariants(self, held: Sequence[int], num_sequences: int) -> None:
        """held: the slots of all sequences, and those they save in. Raises AssertionError naming what does not hold."""
        slots = [*self._free, *self._slot_of.values(), *held]
        assert sorted(slots) == list(range(self._num_slots)), "state slots were lost, or have two holders"
        assert num_sequences == self._num_sequences, "the number of sequences with a state differs"

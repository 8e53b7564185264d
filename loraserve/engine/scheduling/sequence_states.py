"""The recurrent states of sequences: one for each that runs, and those saved for sequences that start with the same
tokens.

Keys and values can be shared up to any block. A recurrent state can only be continued where it was saved: at the end
of each part of a prompt, where a prompt was seen to differ from an earlier one, and after an output's last full block.
"""

from collections.abc import Sequence as Seq

from loraserve.engine.kv.blocks import BlockHash
from loraserve.engine.kv.states import StatePool
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.sequence import Sequence

UNCERTAIN_TOKENS = 8
"""A prompt's last tokens, after which nothing is saved: they start the answer, and the next turn of the conversation
may have others there."""
MAX_UNKNOWN_STATES = 4
"""Saved states of a prompt that has no token yet; until then nobody can find them. The slots of its earlier ones are
used again, so that a long prompt does not evict all others' states."""
MIN_SHARED_TOKENS = 64
"""To save a state where two prompts begin to differ, a step may end there; for fewer tokens it would not pay."""


class SequenceStates:
    """Maintains `state_slot` and `states_to_save` of running sequences. Without a pool nothing needs to be done."""

    def __init__(self, pool: StatePool | None, block_size: int, *, saves: bool) -> None:
        """pool: None for a model without recurrent states. saves: for the prefix cache."""
        self._pool = pool
        self._block_size = block_size
        self.saves = saves and pool is not None
        """Whether any states are saved."""
        self._copies: list[tuple[int, int]] = []

    def limit_prefix(self, sequence: Sequence, hashes: Seq[BlockHash]) -> int:
        """How many of a sequence's first blocks, whose keys and values are cached, need not be computed.

        Also notes where they end, if a state should be saved there.
        """
        if self._pool is None:
            return len(hashes)
        count = self._pool.num_blocks_to_skip(hashes)
        num_lost = (len(hashes) - count) * self._block_size
        sequence.num_shared_tokens = len(hashes) * self._block_size if num_lost >= MIN_SHARED_TOKENS else 0
        return count

    def enter(self, sequence: Sequence, num_blocks: int) -> None:
        """Give it a state; that after `num_blocks` of its blocks if it skips some."""
        if self._pool is None:
            return
        source = self._pool.use(sequence.block_hashes[num_blocks - 1]) if num_blocks > 0 else None
        sequence.state_slot = self._pool.enter()
        if source is not None and source != sequence.state_slot:
            self._copies.append((source, sequence.state_slot))

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Give the child a copy of its parent's state."""
        if self._pool is not None:
            child.state_slot = self._pool.enter()
            self._copies.append((parent.state_slot, child.state_slot))

    def hand_over(self, parent: Sequence, child: Sequence) -> None:
        """Give the child its parent's states, because the parent has its place only until all are forked."""
        child.state_slot, parent.state_slot = parent.state_slot, -1
        child.states_to_save, parent.states_to_save = parent.states_to_save, []

    def release(self, sequence: Sequence) -> None:
        if self._pool is None:
            return
        if sequence.state_slot >= 0:
            self._pool.leave(sequence.state_slot)
        for _, slot in sequence.states_to_save:
            self._pool.give_back(slot)
        sequence.state_slot = -1
        sequence.states_to_save = []
        sequence.last_output_block = None

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) slots, to be copied in order before the next forward pass."""
        copies, self._copies = self._copies, []
        return copies

    def limit_rows(self, sequence: Sequence, num_rows: int) -> int:
        """Fewer rows if a state has to be saved before their end, and another one at their end."""
        start, shared = sequence.num_computed_tokens, sequence.num_shared_tokens
        if not self.saves or not start < shared < start + num_rows:
            return num_rows
        return num_rows if self._last_saved(sequence, start + num_rows) == shared else shared - start

    def plan_save(self, item: ScheduledSequence) -> None:
        """Have the step save a state if its rows contain a position for that."""
        sequence, start = item.sequence, item.sequence.num_computed_tokens
        if not self.saves or not self._block_size <= start + item.num_rows:
            return
        end = self._last_saved(sequence, start + item.num_rows)
        if sequence.num_shared_tokens == start + item.num_rows:
            end = sequence.num_shared_tokens
        if end <= start:
            return
        assert self._pool is not None
        slot = self._slot_to_save_in(sequence)
        if slot is not None:
            item.save_slot, item.num_rows_saved = slot, end - start
            sequence.states_to_save.append((end // self._block_size, slot))

    def remember(self, sequence: Sequence) -> None:
        """Make its states findable that were saved since the last call; its full blocks have been hashed."""
        if not sequence.states_to_save:
            return
        assert self._pool is not None
        for num_blocks, slot in sequence.states_to_save:
            block = sequence.block_hashes[num_blocks - 1]
            self._pool.save(block, slot)
            if num_blocks * self._block_size > sequence.num_prompt_tokens:
                if sequence.last_output_block is not None:
                    self._pool.forget(sequence.last_output_block)
                sequence.last_output_block = block
        sequence.states_to_save = []

    def _slot_to_save_in(self, sequence: Sequence) -> int | None:
        """A new one or, if there is none or it has many already, that of its earliest state."""
        assert self._pool is not None
        earlier = sequence.states_to_save
        slot = self._pool.try_allocate() if len(earlier) < MAX_UNKNOWN_STATES else None
        if slot is not None or not earlier:
            return slot
        is_shared = earlier[0][0] * self._block_size == sequence.num_shared_tokens and len(earlier) > 1
        return earlier.pop(int(is_shared))[1]

    def _last_saved(self, sequence: Sequence, end: int) -> int:
        """The last position up to `end` after which a state is worth saving."""
        if end <= sequence.num_prompt_tokens:
            end = min(end, sequence.num_prompt_tokens - UNCERTAIN_TOKENS)
        return end // self._block_size * self._block_size

    def check_invariants(self, running: Seq[Sequence]) -> None:
        if self._pool is not None:
            held = [slot for each in running for slot in (each.state_slot, *(slot for _, slot in each.states_to_save))]
            self._pool.check_invariants(held, len(running))

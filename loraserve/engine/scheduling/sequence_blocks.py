"""The KV blocks of sequences: those that their next rows need, and the full blocks that other sequences may find."""

from collections.abc import Sequence as Seq

from loraserve.engine.kv.blocks import BlockPool, activation_hash, block_hash
from loraserve.engine.scheduling.sequence import Sequence
from loraserve.engine.scheduling.sequence_states import SequenceStates


class SequenceBlocks:
    """Maintains `blocks`, `block_hashes` and `num_remembered_blocks` of running sequences."""

    def __init__(self, pool: BlockPool, block_size: int, states: SequenceStates | None = None) -> None:
        """states: None for a model without recurrent states."""
        self._pool = pool
        self._states = states or SequenceStates(None, block_size, saves=False)
        self._block_size = block_size

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks for a prefix of the sequence's tokens, never for all: the last row is always computed. Empty
        if every row must be computed."""
        if sequence.needs_prompt_logprobs or sequence.state.wants_mean:
            return []
        num_full = (sequence.num_tokens - 1) // self._block_size
        self._extend_hashes(sequence, num_full)
        blocks = self._pool.match_prefix(sequence.block_hashes[:num_full])
        return blocks[: self._states.limit_prefix(sequence, sequence.block_hashes[: len(blocks)])]

    def num_to_admit(self, sequence: Sequence, cached: list[int]) -> int:
        """Number of available blocks that it takes, including those of its cached prefix that nobody references."""
        return -(-sequence.num_tokens // self._block_size) - len(cached) + self._pool.num_evictable(cached)

    def num_missing(self, sequence: Sequence, num_rows: int) -> int:
        """Number of blocks that `try_extend` would allocate."""
        start, size = sequence.num_computed_tokens, self._block_size
        num_new = max((start + num_rows - 1) // size + 1 - len(sequence.blocks), 0)
        return num_new + self._must_copy(sequence)

    def try_extend(self, sequence: Sequence, num_rows: int, copies: list[tuple[int, int]]) -> bool:
        """Give the sequence its own blocks for its next rows; a shared block must be copied before it is written.

        copies: receives the (source, destination) of such a copy. Returns False and changes nothing if there are too
        few blocks.
        """
        num_missing = self.num_missing(sequence, num_rows)
        if num_missing == 0:
            return True
        blocks = self._pool.try_allocate(num_missing)
        if blocks is None:
            return False
        if self._must_copy(sequence):
            written = sequence.num_computed_tokens // self._block_size
            source, copy = sequence.blocks[written], blocks.pop()
            copies.append((source, copy))
            sequence.blocks[written] = copy
            self._pool.release([source])
        sequence.blocks += blocks
        return True

    def try_extend_all(self, sequences: Seq[Sequence]) -> bool:
        """`try_extend` for one row of each sequence, but also returns False and changes nothing if a block must be
        copied."""
        size, is_shared = self._block_size, self._pool.is_shared
        without_block: list[Sequence] = []
        for sequence in sequences:
            written, held = sequence.num_computed_tokens // size, sequence.blocks
            if written == len(held):
                without_block.append(sequence)
            elif is_shared(held[written]):
                return False
        blocks = self._pool.try_allocate(len(without_block))
        if blocks is None:
            return False
        for sequence, block in zip(without_block, blocks, strict=True):
            sequence.blocks.append(block)
        return True

    def _must_copy(self, sequence: Sequence) -> bool:
        """Whether other sequences also reference the block that its next row is written to."""
        written = sequence.num_computed_tokens // self._block_size
        return written < len(sequence.blocks) and self._pool.is_shared(sequence.blocks[written])

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Give the child a reference to every block of the parent."""
        child.blocks = list(parent.blocks)
        child.block_hashes = list(parent.block_hashes)
        child.num_remembered_blocks = parent.num_remembered_blocks
        self._pool.acquire(child.blocks)

    def remember(self, sequence: Sequence) -> None:
        """Make its full, computed blocks findable, except a block that is completed by a token not known yet."""
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self._block_size
        if num_full <= sequence.num_remembered_blocks:
            return
        self._extend_hashes(sequence, num_full)
        for i in range(sequence.num_remembered_blocks, num_full):
            self._pool.remember(sequence.blocks[i], sequence.block_hashes[i])
        sequence.num_remembered_blocks = num_full

    def release(self, sequence: Sequence) -> None:
        """Release all of its blocks."""
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_remembered_blocks = 0

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        hashes, size, state = sequence.block_hashes, self._block_size, sequence.state
        while len(hashes) < num_blocks:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else state.root_hash
            if max(start, 1) <= state.adapter_start < start + size:
                assert state.request.adapter_digest is not None
                parent = activation_hash(parent, state.request.adapter_digest, state.adapter_start)
            hashes.append(block_hash(parent, sequence.token_ids[start : start + size]))

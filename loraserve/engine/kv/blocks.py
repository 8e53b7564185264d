"""Reference-counted KV blocks with a cache of full blocks keyed by everything they depend on.

A block is free (holds nothing), cached (unreferenced, holds a prefix, evicted least recently used first) or referenced.
NOTE: free + cached + referenced = total, always; `check_invariants` proves it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from struct import pack

BlockHash = bytes


def root_hash(salt: str, base_fingerprint: str, adapter_digest: str | None) -> BlockHash:
    """Start of a hash chain. Every field is tagged and length-prefixed, so no two different triples collide."""
    digest = sha256(b"loraserve-kv-1")
    for tag, value in ((b"salt", salt), (b"base", base_fingerprint), (b"lora", adapter_digest)):
        encoded = b"" if value is None else value.encode()
        digest.update(tag + pack("<?Q", value is not None, len(encoded)) + encoded)
    return digest.digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of a full block that follows `parent`, the hash of the block before it (or the root)."""
    return sha256(parent + pack(f"<{len(token_ids)}q", *token_ids)).digest()


def activation_hash(parent: BlockHash, adapter_digest: str, position: int) -> BlockHash:
    """In place of `parent` for the block in which an activated adapter begins, at that position: blocks before it are
    the base model's, whichever adapter a request uses."""
    return sha256(b"loraserve-kv-activation" + parent + pack("<Q", position) + adapter_digest.encode()).digest()


@dataclass(slots=True)
class BlockCounts:
    free: int
    cached: int
    referenced: int


class BlockPool:
    """Hands out block ids 0 to num_blocks - 1. Knows nothing of sequences or tensors."""

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._enable_caching = enable_caching
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, so untouched memory stays untouched
        self._num_never_allocated = num_blocks  # at the bottom of that stack
        self._num_references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_available(self) -> int:
        """Blocks that `try_allocate` can hand out."""
        return len(self._free) + len(self._evictable)

    @property
    def num_ever_allocated(self) -> int:
        """Ids from this one on were never handed out; all others were."""
        return self.num_blocks - self._num_never_allocated

    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._evictable)
        return BlockCounts(free, cached, self.num_blocks - free - cached)

    def try_allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, evicting cached ones if needed; None if there are too few."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                self._forget(block)
            self._num_references[block] = 1
            blocks.append(block)
        self._num_never_allocated = min(self._num_never_allocated, len(self._free))
        return blocks

    def match_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Cached blocks for the longest known prefix of `hashes`, without referencing them."""
        blocks = []
        for value in hashes:
            block = self._block_of.get(value)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block; those that were cached are no longer evictable."""
        for block in blocks:
            if self._num_references[block] == 0:
                del self._evictable[block]
            self._num_references[block] += 1

    def num_evictable(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` count as available now and would not once acquired."""
        return sum(self._num_references[block] == 0 for block in blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each. Pass a sequence's blocks in position order: its tail is evicted first."""
        for block in reversed(blocks):
            assert self._num_references[block] > 0, f"block {block} released without a reference"
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[block] = None

    def num_references(self, block: int) -> int:
        return self._num_references[block]

    def is_shared(self, block: int) -> bool:
        return self._num_references[block] > 1

    def remember(self, block: int, value: BlockHash) -> None:
        """Make a full, computed, referenced block findable. The first block of a hash stays the one found."""
        if self._enable_caching and value not in self._block_of and self._hash_of[block] is None:
            self._block_of[value] = block
            self._hash_of[block] = value

    def forget(self, blocks: Sequence[int]) -> None:
        """Never find these referenced blocks again, e.g. because they hold non-finite values."""
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is not referenced"
            self._forget(block)

    def _forget(self, block: int) -> None:
        value = self._hash_of[block]
        if value is not None:
            del self._block_of[value]
            self._hash_of[block] = None

    def check_invariants(self, tables: Sequence[Sequence[int]]) -> None:
        """`tables`: the blocks of every live sequence. Raises AssertionError naming what does not hold."""
        references = [0] * self.num_blocks
        for table in tables:
            for block in table:
                references[block] += 1
        assert references == self._num_references, "references differ from the live block tables"
        free, cached = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is in the free list twice"
        referenced = {block for block, count in enumerate(references) if count}
        assert not free & cached, "a block is free and cached"
        assert not (free | cached) & referenced, "a block is available and referenced"
        assert len(free) + len(cached) + len(referenced) == self.num_blocks, "blocks were lost"
        untouched = list(range(self.num_blocks - 1, self.num_ever_allocated - 1, -1))
        assert self._free[: len(untouched)] == untouched, "never-allocated blocks are not first in the free list"
        assert all(self._hash_of[block] is None for block in free), "a free block can be found by its hash"
        assert all(self._hash_of[block] is not None for block in cached), "a cached block cannot be found by its hash"
        assert {self._hash_of[block]: block for block in self._block_of.values()} == self._block_of, "hashes disagree"

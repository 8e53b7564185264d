"""The adapters of sequences: references to those in the arena, on behalf of the sequences that use them."""

from collections import Counter
from collections.abc import Sequence as Seq

from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.scheduling.sequence import Sequence


class SequenceAdapters:
    """Maintains `adapter_slot` of running sequences: -1 for the base model, which holds no reference."""

    def __init__(self, memory: AdapterMemory | None, max_loras: int | None) -> None:
        """memory: None if the engine serves the base model only. max_loras: None = as many as fit the arena."""
        self._memory = memory
        self._max_loras = max_loras

    def has_news(self) -> bool:
        """`AdapterMemory.has_news`: whether trying again can succeed."""
        return self._memory is not None and self._memory.has_news()

    def settle_uploads(self) -> None:
        """`AdapterMemory.settle_uploads`: once before each round of `try_acquire`."""
        if self._memory is not None:
            self._memory.settle_uploads()

    def can_acquire(self, sequence: Sequence) -> bool:
        """Whether its adapter is resident or fits beside those in use. Cheap, because it is called for every waiting
        sequence."""
        digest = sequence.request.adapter_digest
        if digest is None:
            return True
        assert self._memory is not None
        if self._max_loras is not None and self._memory.num_in_use >= self._max_loras:
            return self._memory.is_in_use(digest)
        return self._memory.can_make_room(digest)

    def is_cold(self, sequence: Sequence) -> bool:
        """Whether its adapter has to be loaded first."""
        digest = sequence.request.adapter_digest
        return self._memory is not None and digest is not None and not self._memory.is_resident(digest)

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether its adapter was being read when `settle_uploads` was called. As cheap as `can_acquire`."""
        digest = sequence.request.adapter_digest
        return self._memory is not None and digest is not None and self._memory.is_loading(digest)

    def is_arriving(self, sequence: Sequence) -> bool:
        """Whether its adapter, which cannot be acquired now, has its place in the arena."""
        digest = sequence.request.adapter_digest
        return self._memory is not None and digest is not None and self._memory.has_place(digest)

    def try_acquire(self, sequence: Sequence, max_arriving_bytes: int | None) -> bool:
        """Returns False if its adapter is not there yet, having started to load it if there is room. Raises
        `AdapterError`.

        max_arriving_bytes: also False while an adapter larger than this is being copied, unless it is in use.
        """
        digest = sequence.request.adapter_digest
        if digest is None:
            return True
        assert self._memory is not None
        adapter_slot = self._memory.try_acquire(digest, max_arriving_bytes)
        if adapter_slot is None:
            return False
        sequence.adapter_slot = adapter_slot
        return True

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Give the child a reference to the adapter that the parent uses."""
        if parent.adapter_slot >= 0:
            has_acquired = self.try_acquire(child, None)
            assert has_acquired, "the parent's adapter is resident"

    def release(self, sequence: Sequence) -> None:
        if sequence.adapter_slot >= 0:
            assert self._memory is not None
            assert sequence.request.adapter_digest is not None
            self._memory.release(sequence.request.adapter_digest)
            sequence.adapter_slot = -1

    def check_invariants(self, running: Seq[Sequence]) -> None:
        """Raises AssertionError unless each running sequence holds one reference, and nothing else holds any."""
        if self._memory is not None:
            digests = (sequence.request.adapter_digest for sequence in running)
            self._memory.check_invariants(Counter(digest for digest in digests if digest is not None))

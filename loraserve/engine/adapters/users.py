"""Which adapters requests may use, and how many requests use each."""

from loraserve_adapters.errors import AdapterError

from loraserve.engine.adapters.memory import AdapterMemory


class AdapterUsers:
    """By digest. An unload is complete when the last request that uses the adapter has finished."""

    def __init__(self, adapters: AdapterMemory | None) -> None:
        """adapters: None = the engine serves the base model alone."""
        self._adapters = adapters
        self.num_requests: dict[str, int] = {}
        """Live requests; an adapter without any has no entry."""
        self.unloading: set[str] = set()
        """Unloads that were requested and are not complete."""
        self._unloaded: list[str] = []

    def load(self, digest: str, packed_path: str) -> None:
        """Make the adapter usable; cancels an unload. Raises `AdapterError`."""
        if self._adapters is None:
            raise AdapterError("lora_disabled", "the engine was started without LoRA (--no-enable-lora)")
        self._adapters.add(digest, packed_path)
        self.unloading.discard(digest)

    def unload(self, digest: str) -> None:
        """No request can enter from now on; `take_unloaded` reports the digest when the last one has left."""
        self.unloading.add(digest)
        self._finish_unload(digest)

    def take_unloaded(self) -> list[str]:
        """Digests whose unload completed since the last call."""
        unloaded, self._unloaded = self._unloaded, []
        return unloaded

    def can_enter(self, digest: str) -> bool:
        return self._adapters is not None and self._adapters.knows(digest) and digest not in self.unloading

    def invocation_of(self, digest: str) -> tuple[int, ...]:
        """The invocation tokens from which it is active, if it is an activated LoRA; else empty. Requires
        `can_enter`."""
        assert self._adapters is not None
        return self._adapters.invocation_of(digest)

    def is_classifier(self, digest: str) -> bool:
        """See `AdapterMemory.is_classifier`. Requires `can_enter`."""
        assert self._adapters is not None
        return self._adapters.is_classifier(digest)

    def enter(self, digest: str) -> None:
        """A request that uses it begins. Requires `can_enter`."""
        assert self._adapters is not None
        self.num_requests[digest] = self.num_requests.get(digest, 0) + 1
        self._adapters.prefetch(digest, self.num_requests.keys())

    def leave(self, digest: str) -> None:
        """A request that uses it has ended."""
        self.num_requests[digest] -= 1
        if self.num_requests[digest] == 0:
            del self.num_requests[digest]
            if digest in self.unloading:
                self._finish_unload(digest)

    def _finish_unload(self, digest: str) -> None:
        if digest in self.num_requests:
            return
        if self._adapters is not None:
            self._adapters.remove(digest)
        self.unloading.discard(digest)
        self._unloaded.append(digest)

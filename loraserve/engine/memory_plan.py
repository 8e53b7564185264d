"""How much memory the KV cache and the adapter arena get, and how long a sequence can then be."""

from dataclasses import dataclass, replace

from loraserve.engine.errors import EngineStartError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Default shares of KV cache and adapters in the memory available once the weights are loaded."""

    kv: float
    max_kv_bytes: int | None
    adapters: float
    max_adapter_bytes: int | None
    hint: str
    """Other ways to make room, to follow "lower --a or --b"."""

    def default_kv_bytes(self, available_bytes: int) -> int:
        return _at_most(int(self.kv * available_bytes), self.max_kv_bytes)

    def default_adapter_bytes(self, available_bytes: int) -> int:
        return _at_most(int(self.adapters * available_bytes), self.max_adapter_bytes)


def _at_most(size_bytes: int, limit_bytes: int | None) -> int:
    return size_bytes if limit_bytes is None else min(size_bytes, limit_bytes)


HOST_SHARES = MemoryShares(0.40, 4 * GIB, 0.15, 2 * GIB, hint="")
"""Low, because other processes use the machine too."""
GPU_SHARES = MemoryShares(
    0.85, None, 0.15, None, hint=", raise --gpu-memory-utilization or lower --max-num-batched-tokens"
)
"""Shares of `GpuMemory.left_bytes`."""
_SMALLER_WEIGHTS = {"none": "int8 or int4", "int8": "int4"}
"""Quantizations that may help if a model with these weights leaves no memory."""


def host_shares(quantization: str) -> MemoryShares:
    smaller = _SMALLER_WEIGHTS.get(quantization)
    hint = f", or shrink the weights with --quantization {smaller}" if smaller else ""
    return replace(HOST_SHARES, hint=hint)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_blocks: int
    num_state_slots: int
    """0 for a model without recurrent states."""
    max_num_seqs: int
    max_model_len: int
    arena_size_bytes: int
    notes: tuple[str, ...]
    """What was lowered and why, for the person who started the server."""


MAX_SAVED_STATES = 1024
"""Recurrent states kept for the prefix cache, however small they are."""
_STATES_SHARE = 0.5
"""Most of the KV cache's memory that recurrent states take, of running sequences and saved ones."""
_RUNNING_SHARE = 0.75
"""Most of the slots for states that running sequences may take, if states are also saved."""


def plan_memory(
    *,
    available_bytes: int,
    block_bytes: int,
    block_size: int,
    model_max_len: int,
    requested_max_len: int | None,
    max_num_seqs: int,
    state_bytes: int = 0,
    saves_states: bool = True,
    kv_cache_bytes: int | None,
    adapter_bytes: int | None,
    enable_lora: bool,
    shares: MemoryShares = HOST_SHARES,
) -> MemoryPlan:
    """Raises `EngineStartError` if fewer than two blocks fit, or if more memory or length is requested than there
    is.

    state_bytes: recurrent states of a sequence. saves_states: they are also saved for the prefix cache.
    """
    notes = []
    if kv_cache_bytes is None:
        kv_cache_bytes = shares.default_kv_bytes(available_bytes)
        if kv_cache_bytes < 2 * block_bytes:
            raise EngineStartError(
                f"the weights leave {available_bytes} bytes, too few for a KV cache: use a smaller model or more "
                f"memory{shares.hint}"
            )
    if adapter_bytes is None:
        adapter_bytes = shares.default_adapter_bytes(available_bytes)
    if kv_cache_bytes + (adapter_bytes if enable_lora else 0) > available_bytes:
        raise EngineStartError(
            f"the KV cache ({kv_cache_bytes} bytes) and the adapter memory ({adapter_bytes} bytes) exceed the "
            f"{available_bytes} bytes available: lower --kv-cache-memory-bytes or --adapter-memory-bytes{shares.hint}"
        )
    num_state_slots = 0
    if state_bytes > 0:
        needed_bytes = -(-(requested_max_len or 0) // block_size) * block_bytes
        num_state_slots, most = _plan_states(
            kv_cache_bytes, needed_bytes, state_bytes, max_num_seqs, shares, saves_states=saves_states
        )
        if most < max_num_seqs:
            notes.append(
                f"max_num_seqs lowered from {max_num_seqs} to {most}: each sequence has a recurrent state of "
                f"{state_bytes} bytes (--kv-cache-memory-bytes)"
            )
            max_num_seqs = most
    states = f", {num_state_slots * state_bytes} of them for recurrent states," if num_state_slots else ""
    of_cache = f"a KV cache of {kv_cache_bytes} bytes{states}"
    num_blocks = (kv_cache_bytes - num_state_slots * state_bytes) // block_bytes
    if num_blocks < 2:
        raise EngineStartError(
            f"{of_cache} holds {num_blocks} blocks of {block_bytes} bytes, but at least 2 "
            f"are needed: raise --kv-cache-memory-bytes{shares.hint}"
        )
    if requested_max_len is not None and requested_max_len > model_max_len:
        raise EngineStartError(f"--max-model-len {requested_max_len} exceeds the model's {model_max_len} positions")
    max_model_len = requested_max_len or model_max_len
    fitting = num_blocks * block_size
    if fitting < max_model_len:
        notes.append(
            f"max_model_len lowered from {max_model_len} to {fitting}: {of_cache} holds "
            "no more tokens (--kv-cache-memory-bytes)"
        )
        max_model_len = fitting
    arena_size_bytes = adapter_bytes if enable_lora else 0
    return MemoryPlan(num_blocks, num_state_slots, max_num_seqs, max_model_len, arena_size_bytes, tuple(notes))


def _plan_states(
    kv_cache_bytes: int,
    needed_bytes: int,
    state_bytes: int,
    max_num_seqs: int,
    shares: MemoryShares,
    *,
    saves_states: bool,
) -> tuple[int, int]:
    """(Slots for recurrent states, sequences that can run at once). needed_bytes: keys and values of the longest
    sequence, for which saved states make room."""
    most = int(kv_cache_bytes * _STATES_SHARE) // state_bytes
    if most == 0:
        raise EngineStartError(
            f"half of a KV cache of {kv_cache_bytes} bytes does not hold the recurrent state of a sequence, of "
            f"{state_bytes} bytes: raise --kv-cache-memory-bytes{shares.hint}"
        )
    if not saves_states:
        num_slots = min(most, max_num_seqs)
        return num_slots, num_slots
    num_running = min(max(int(most * _RUNNING_SHARE), 1), max_num_seqs)
    num_saved = min(most - num_running, MAX_SAVED_STATES)
    num_spare = max(kv_cache_bytes - needed_bytes, 0) // state_bytes - num_running
    return num_running + max(min(num_saved, num_spare), 0), num_running

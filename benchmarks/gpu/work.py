"""The workload that the engine is measured with on a GPU. Tests use a smaller one."""

from collections.abc import Sequence
from dataclasses import dataclass

from shapes import ALL_LINEAR


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts that arrive at once."""

    batch_size: int
    prompt_tokens: int
    num_adapters: int


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """Adapters that take the ranks in turn."""

    name: str
    lora_ranks: tuple[int, ...]
    linears: tuple[str, ...] = tuple(ALL_LINEAR)
    num_adapters: int = 64
    """Distinct ones in a batch, at most."""
    batch_sizes: tuple[int, ...] = ()
    """One decode measurement for each; empty = a single one, of `Work.max_adapters` requests."""

    def num_of_batch(self, batch_size: int) -> int:
        return min(batch_size, self.num_adapters)

    def mean(self, values: Sequence[float]) -> float:
        """Mean per adapter. values: one per rank."""
        return sum(values) / len(self.lora_ranks)


RANK_16 = AdapterKind("r16", (16,))
ATTENTION = AdapterKind("r16 qkvo", (16,), ("q_proj", "k_proj", "v_proj", "o_proj"))
OTHER_KINDS = (
    ATTENTION,
    AdapterKind("r64", (64,), num_adapters=16),
    AdapterKind("r8", (8,), num_adapters=128, batch_sizes=(64, 128)),
    AdapterKind("r8/16/32/64", (8, 16, 32, 64), num_adapters=32),
    AdapterKind("r4", (4,), num_adapters=256, batch_sizes=(256,)),
)
"""All adapters of a kind fit into the bytes of `RANK_16`'s, so that large batches too can have one per request."""


@dataclass(frozen=True, slots=True)
class Work:
    batch_sizes: tuple[int, ...] = (1, 16, 64, 128, 256)
    num_tokens: int = 128
    """Prompt tokens, and output tokens, of each request in a decode measurement."""
    kind: AdapterKind = RANK_16
    """The device has room for as many of these as a batch has at most."""
    other_kinds: tuple[AdapterKind, ...] = OTHER_KINDS
    """Each has its own decode measurements."""
    seed: int = 0
    """For weights and prompts."""
    turn_steps: int = 12
    """Decode steps in one engine's turn."""
    dtype: str = "bfloat16"
    max_num_batched_tokens: int = 2048
    kv_cache_memory_bytes: int | None = None
    """None = enough for the measurements."""
    prefills: tuple[Prefill, ...] = (Prefill(1, 2048, 1), Prefill(16, 512, 8))
    """The second takes four steps, each with four adapters."""
    prefill_repeats: int = 5
    cold_prompts: tuple[int, ...] = (16, 512, 2048)
    cold_repeats: int = 5
    """Each uses its own adapter on the host, in the page cache and on disk."""
    loading_prompts: tuple[int, ...] = (16, 512)
    """Prompt lengths of requests that arrive during decodes and whose adapters must be loaded."""
    loading_batch_size: int = 16
    """Number of those decodes."""
    loading_steps: int = 16
    """Steps measured after each arrival, at least."""
    warm_tokens: int = 8
    profiled_steps: int = 24
    probe_bytes: int = 1 << 30
    """Size of the buffers for measuring bandwidths."""

    @property
    def max_adapters(self) -> int:
        return self.kind.num_adapters

    @property
    def max_batch_size(self) -> int:
        return max(self.batch_sizes)

    @property
    def num_cold_adapters(self) -> int:
        return len(self.cold_prompts) * self.cold_repeats

    @property
    def num_used_while_loading(self) -> int:
        """Distinct adapters of the decodes; the device has room for at least one more."""
        return min(self.loading_batch_size, max(self.max_adapters // 2, 1))

    @property
    def mean_context(self) -> float:
        """Mean number of keys that a row sees in a decode step; for the second token, one more than the prompt has."""
        return self.num_tokens + self.num_tokens / 2

    def batch_sizes_of(self, kind: AdapterKind) -> tuple[int, ...]:
        return kind.batch_sizes or (self.max_adapters,)

    def adapter_counts(self, batch_size: int) -> list[int]:
        most = min(batch_size, self.max_adapters)
        return sorted({0, 1, min(8, most), most})

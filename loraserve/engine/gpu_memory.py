"""Measures how much GPU memory is left for KV cache and adapters, by running the largest possible step."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.attention_work import APPEND_ROWS
from loraserve_kernels.backend import Backend
from loraserve_kernels.logit_edits import RowEdits, pack_edits
from loraserve_kernels.sampling import SamplesOnDevice, pack_draws
from loraserve_kernels.step_batch import Segments, StepBatch

from loraserve.engine.config import EngineConfig
from loraserve.engine.device.accelerator import Accelerator
from loraserve.engine.errors import EngineStartError
from loraserve.engine.sampling.device_logprobs import LOGPROBS_BYTES, ROWS_PER_CHUNK
from loraserve.engine.steps.model_runner import ModelRunner
from loraserve.models.causal_model import CausalModel

EDIT_BYTES = 8
"""Per logit of every sequence: the token's count, and the edited logit in float32."""
COMPILED_ROWS = (1, 2, 16, 17, 32, 64, 128, 129, 256, 512, 513)
"""Rows of one sequence, on both sides of each change in the kernels' tile sizes."""
_MEMORY_FLAGS = "--kv-cache-memory-bytes, --adapter-memory-bytes or --max-num-batched-tokens"
OUT_OF_MEMORY_ADVICE = (
    f"lower --max-model-len, {_MEMORY_FLAGS}, or raise --gpu-memory-utilization if nothing else needs the GPU"
)
STEP_OUT_OF_MEMORY_ADVICE = f"lower --gpu-memory-utilization, --max-num-seqs, {_MEMORY_FLAGS}"
"""For a running engine: cache and adapters have their share, and the rest was too little."""


class GpuMemory:
    """Our share of the memory that was free at the start, before the weights were loaded."""

    def __init__(self, accelerator: Accelerator, utilization: float) -> None:
        """Raises `EngineStartError` for a utilization that is not in (0, 1]."""
        if not 0 < utilization <= 1:
            raise EngineStartError(f"--gpu-memory-utilization is {utilization:g}; it must be above 0 and at most 1")
        self._accelerator = accelerator
        self._free_at_start = accelerator.free_bytes()
        self._share_bytes = int(utilization * self._free_at_start)

    def left_bytes(self, activation_bytes: int = 0) -> int:
        """What is left of our share besides the memory allocated now and a step's temporary memory."""
        taken = self._free_at_start - self._accelerator.free_bytes() + activation_bytes
        if taken >= self._share_bytes:
            raise EngineStartError(
                f"weights, activations and programs started in the meantime take {taken} bytes of "
                f"{self._accelerator.device}, but this server's share is {self._share_bytes} bytes "
                f"(--gpu-memory-utilization of the {self._free_at_start} that were free): {OUT_OF_MEMORY_ADVICE}"
            )
        return self._share_bytes - taken


def activation_bytes(
    accelerator: Accelerator,
    model: CausalModel,
    table: AdapterTable | None,
    config: EngineConfig,
    kv_dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> int:
    """The measured peak memory of a step besides weights, KV cache and adapters; graphs need as much again.

    Also compiles the kernels of steps that are not graphs. table: for adapters of rank 0. Replaces the model's caches
    and table.
    """
    num_rows = config.max_num_batched_tokens
    num_sampled = min(config.max_num_seqs, num_rows)
    runner = ModelRunner(model, 1, config.block_size, table, accelerator.device, kv_dtype)

    def batch(num_rows: Sequence[int], num_sampled: int) -> StepBatch:
        return _profile_batch(num_rows, num_sampled, config.block_size, table is not None, accelerator.device)

    sizes = [size for size in COMPILED_ROWS if size < num_rows]
    compiled = [batch([size], size) for size in sizes]  # with prompt logprobs every row is sampled
    largest = [batch(rows, num_sampled) for rows in ([num_rows], _with_few_rows(num_rows, config.max_num_seqs))]
    for index, each in enumerate([*compiled, *largest]):
        runner.forward(each)
        progress(index + 1, len(compiled) + len(largest))
    measured = max(accelerator.peak_bytes(partial(runner.forward, each)) for each in largest)
    row_bytes = model.logits_size * model.dtype.itemsize
    prompt_logits = (num_rows - num_sampled) * row_bytes
    # When prompt logprobs are computed, all of the step's own memory except its logits is free again.
    scored = min(num_rows, ROWS_PER_CHUNK) * model.logits_size * LOGPROBS_BYTES
    scored += num_sampled * row_bytes
    graphs = 0 if config.enforce_eager else measured
    return max(measured, scored) + graphs + prompt_logits + _sampling_bytes(config.max_num_seqs, model.logits_size)


def _sampling_bytes(num_rows: int, logits_size: int) -> int:
    """If every row has edits and requests log-probabilities."""
    return logits_size * (num_rows * EDIT_BYTES + min(num_rows, ROWS_PER_CHUNK) * LOGPROBS_BYTES)


def compile_sampling(backend: Backend, model: CausalModel, vocab_size: int) -> None:
    """Choose greedy and drawn tokens once, also with edits, if the backend can: no request then waits for the
    compiler."""
    if not isinstance(backend, SamplesOnDevice):
        return
    logits = torch.zeros((2, model.logits_size), dtype=model.dtype, device=model.device)
    draws = pack_draws([1.0] * 2, [0] * 2, [1.0] * 2, [0.0] * 2, [0] * 2, [0] * 2, model.device)
    counts = torch.zeros((2, vocab_size), dtype=torch.int32, device=model.device)
    edits = pack_edits([RowEdits(bias={0: 1.0}, count_row=row) for row in range(2)], counts)
    for choice in (None, draws):
        backend.sample(logits, vocab_size, choice, None)
        backend.count_tokens(edits, *backend.sample(logits, vocab_size, choice, edits))


def _with_few_rows(num_rows: int, max_num_seqs: int) -> list[int]:
    """Rows of each sequence: as many sequences with few rows as possible, and one with all remaining rows.

    Attention keeps partial results for sequences with few rows: 16 rows of float32 for each head and part.
    """
    few = min(max(num_rows // max_num_seqs, 2), APPEND_ROWS)
    num_few = min(max_num_seqs - 1, (num_rows - 1) // few)
    return [few] * num_few + [num_rows - num_few * few]


def _profile_batch(
    num_rows: Sequence[int], num_sampled: int, block_size: int, has_adapter: bool, device: torch.device
) -> StepBatch:
    """num_rows: per sequence. Every context has as many keys as there are rows in total.

    All entries of the block table name the same single block, and K and V are written only there.
    """
    total = sum(num_rows)
    starts = [0, *accumulate(num_rows)][:-1]

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows = torch.arange(total, device=device)
    slot = 0 if has_adapter else -1
    return StepBatch(
        token_ids=torch.zeros_like(rows),
        positions=torch.zeros_like(rows),
        slot_mapping=rows % block_size,
        block_table=torch.zeros((len(num_rows), -(-total // block_size)), dtype=torch.int32, device=device),
        context_lens=int32(*[total] * len(num_rows)),
        row_start=int32(*starts),
        num_rows=int32(*num_rows),
        segments=Segments(int32(0, total), int32(slot), has_adapter),
        sampled_rows=rows[total - num_sampled :],
        sampled_segments=Segments(int32(0, num_sampled), int32(slot), has_adapter),
    )

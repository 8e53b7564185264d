"""An engine around a model that is a hash: the next token depends on every token and adapter in the KV blocks.

A wrong block, a stale prefix, a missed copy, a wrong adapter or a wrong row changes the generated tokens;
`expected_choice` computes the right ones in plain Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.argmax import argmax_reference
from loraserve_kernels.decoder_model import ModelOutput
from loraserve_kernels.draw import draw_reference
from loraserve_kernels.logit_edits import LogitEdits, count_tokens_reference
from loraserve_kernels.reference_backend import ReferenceBackend
from loraserve_kernels.sampling import DrawParams, sample_reference
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor

from loraserve.engine.adapters.arrival import StepArrivals
from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.config import EngineConfig
from loraserve.engine.device.accelerator import Accelerator
from loraserve.engine.engine import Engine
from loraserve.engine.request import (
    EngineErrorCode,
    EngineRequest,
    FinishReason,
    Pooling,
    PoolingParams,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
)
from loraserve.engine.sampling.device_sampler import QueuedTokens
from loraserve.engine.sampling.sampler import Sampler, SamplingRow
from loraserve.engine.scheduling.drafter import FreeRows
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.steps.batch_builder import BatchBuilder
from loraserve.engine.steps.gpu_batch_builder import GpuBatchBuilder
from loraserve.engine.steps.graphs import NO_GRAPHS
from tests.support.hash_grammars import EOS, VOCAB_SIZE, can_come, can_follow, hash_grammars

LOGITS_SIZE = 32
BASE = -1.0
"""Base model rows write this into the cache in place of an adapter's value."""


def logits_after(adapter_value: float, token_ids: Sequence[float]) -> np.ndarray:
    """[LOGITS_SIZE]: logits of the token after `token_ids`, with the adapter whose elements are `adapter_value`."""
    words = np.array([adapter_value, *token_ids], np.float64)
    if not np.isfinite(words).all():
        return np.full(LOGITS_SIZE, np.nan, np.float32)
    return np.frombuffer(sha256(words.tobytes()).digest(), np.uint8).astype(np.float32) / 32


class HashRunner:
    """Stands in for `ModelRunner`. A KV cell holds its token, its adapter and who may read it.

    A recurrent state holds the tokens and adapters of all rows that led to it.
    """

    def __init__(self, num_blocks: int, block_size: int, table: AdapterTable | None, num_state_slots: int = 0) -> None:
        self.states: list[list[tuple[float, float]]] = [[(np.nan, np.nan)] for _ in range(num_state_slots)]
        self.num_states_continued = 0
        """States that were copied to a sequence which then computed rows from there."""
        self.tokens = np.zeros((num_blocks, block_size))
        self.adapters = np.zeros((num_blocks, block_size))
        self.readers = np.full((num_blocks, block_size), None, object)
        self.scheduled: list[ScheduledSequence] = []
        """Sequences of the next batch; only used to know whose rows they are."""
        self.poison_next: int | None = None
        """The next batch writes NaN for the rows of its sequence with this index, modulo their number."""
        self.poisoned: set[str] = set()
        self.num_forwards = 0
        self.num_drawn_within = 0
        """Tokens drawn by `forward` itself."""
        self.num_ahead = 0
        """Forwards of batches that were queued after a step whose tokens were not collected yet."""
        self.num_again = 0
        """Forwards of batches built from the previous one, with the same sequences; on a device they are ahead too."""
        self.batch_adapters: list[set[str | None]] = []
        self.can_touch_ahead = False
        self.num_used_blocks = 0
        """As last passed to `touch_ahead`."""
        self._block_size = block_size
        self._table = table

    def forward(self, batch: StepBatch, arrivals: StepArrivals | None = None) -> ModelOutput:
        """Returns the largest logits and the drawn tokens too, as a backend may, except in two of every eight steps."""
        if arrivals is not None:
            arrivals.before_group(0)
        self.num_forwards += 1
        self.batch_adapters.append({item.sequence.request.adapter_digest for item in self.scheduled})
        num_rows = len(batch.token_ids)
        adapter_of_row = self._spread(batch.segments.start, batch.segments.adapter_slot, num_rows)
        num_sampled = len(batch.sampled_rows)
        adapter_of_sampled = self._spread(
            batch.sampled_segments.start, batch.sampled_segments.adapter_slot, num_sampled
        )
        assert batch.segments.has_adapter == any(value != BASE for value in adapter_of_row)
        assert adapter_of_sampled == [adapter_of_row[row] for row in batch.sampled_rows.tolist()]
        self._write(batch, adapter_of_row)
        if batch.state_slots is not None:
            self._continue_states(batch)
        logits = self._logits_of(batch, batch.sampled_rows, adapter_of_row)
        hidden = None
        if batch.pooled_rows is not None:
            hidden = self._logits_of(batch, batch.pooled_rows, adapter_of_row)
        if self.num_forwards % 8 in (4, 5):
            return ModelOutput(logits, hidden=hidden)
        self.num_drawn_within += len(batch.draws)
        best, drawn = argmax_reference(logits, VOCAB_SIZE), draw_reference(logits, VOCAB_SIZE, batch.draws)
        return ModelOutput(logits, best, drawn, hidden)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            for cache in (self.tokens, self.adapters, self.readers):
                cache[destination] = cache[source]

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            assert source != destination
            self.states[destination] = self.states[source]
            self.num_states_continued += 1

    def _continue_states(self, batch: StepBatch) -> None:
        slots = batch.state_slots
        assert slots is not None
        written = [slot for slot in (*slots.write.tolist(), *slots.save.tolist()) if slot >= 0]
        assert len(set(written)) == len(written), "two sequences write one slot"
        for i in range(len(slots.write)):
            end, num_rows = int(batch.context_lens[i]), int(batch.num_rows[i])
            cells = [divmod(position, self._block_size) for position in range(end)]
            context = [(int(batch.block_table[i, block]), offset) for block, offset in cells]
            rows = [(float(self.tokens[cell]), float(self.adapters[cell])) for cell in context]
            read, start = int(slots.read[i]), end - num_rows
            before = [] if read < 0 else self.states[read]
            assert np.array_equal(before, rows[:start], equal_nan=True) or before == rows[:start] == []
            self.states[int(slots.write[i])] = rows
            if slots.save[i] >= 0:
                saved = int(slots.num_rows_saved[i])
                assert 1 <= saved <= num_rows
                self.states[int(slots.save[i])] = rows[: start + saved]

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        self.tokens[list(blocks)] = 0
        self.adapters[list(blocks)] = 0
        self.readers[list(blocks)] = None

    def touch_ahead(self, num_used_blocks: int, num_used_states: int) -> bool:
        assert num_used_states <= len(self.states)
        self.num_used_blocks = num_used_blocks
        return self.can_touch_ahead

    def non_finite_blocks(self) -> set[int]:
        return set(np.flatnonzero(np.isnan(self.tokens).any(axis=1)).tolist())

    def _spread(self, start: Tensor, slots: Tensor, num_rows: int) -> list[float]:
        """The adapter value of each row, read from the arena."""
        starts, adapter_slots = start.tolist(), slots.tolist()
        assert num_rows == 0 or (starts[0] == 0 and starts[-1] == num_rows), "segments do not cover the rows"
        assert adapter_slots == sorted(set(adapter_slots)), "segments are not ordered and distinct"
        values = []
        for i, adapter_slot in enumerate(adapter_slots):
            values += [self._adapter_value(adapter_slot)] * (starts[i + 1] - starts[i])
        return values

    def _adapter_value(self, adapter_slot: int) -> float:
        if adapter_slot == -1:
            return BASE
        assert self._table is not None
        return float(self._table.arena[self._table.offset_a[adapter_slot, 0]])

    def _write(self, batch: StepBatch, adapter_of_row: list[float]) -> None:
        cells = batch.slot_mapping.tolist()
        assert len(set(cells)) == len(cells), "two rows write one cell"
        for i, item in enumerate(self.scheduled):
            start, num_rows = int(batch.row_start[i]), int(batch.num_rows[i])
            is_poisoned = self.poison_next is not None and i == self.poison_next % len(self.scheduled)
            if is_poisoned:
                self.poisoned.add(item.sequence.request.request_id)
            for row in range(start, start + num_rows):
                cell = divmod(cells[row], self._block_size)
                self.tokens[cell] = np.nan if is_poisoned else int(batch.token_ids[row])
                self.adapters[cell] = adapter_of_row[row]
                self.readers[cell] = _reader(item.sequence.request)
        if self.scheduled:
            self.poison_next = None

    def _logits_of(self, batch: StepBatch, rows: Tensor, adapter_of_row: list[float]) -> Tensor:
        """Logits, which also stand in for hidden states."""
        logits = [self._logits(batch, row, adapter_of_row[row]) for row in rows.tolist()]
        return torch.from_numpy(np.array(logits, np.float32).reshape(len(rows), LOGITS_SIZE))

    def _logits(self, batch: StepBatch, row: int, adapter_value: float) -> np.ndarray:
        i = int(np.searchsorted(batch.row_start.numpy(), row, side="right")) - 1
        last = int(batch.row_start[i] + batch.num_rows[i]) - 1
        position = int(batch.context_lens[i]) - 1 - (last - row)
        assert position == int(batch.positions[row])
        cells = [divmod(p, self._block_size) for p in range(position + 1)]
        context = [(int(batch.block_table[i, block]), offset) for block, offset in cells]
        reader = _reader(self.scheduled[i].sequence.request)
        assert all(self.readers[cell] == reader for cell in context), "a block of another tenant or adapter is read"
        assert all(self.adapters[cell] == adapter_value for cell in context), "a block of another adapter is read"
        return logits_after(adapter_value, [float(self.tokens[cell]) for cell in context])


def _reader(request: EngineRequest) -> tuple[str, str | None]:
    return request.cache_salt, request.adapter_digest


class _RecordingBuilder:
    sampling = None

    def __init__(self, inner: BatchBuilder, runner: HashRunner) -> None:
        self._inner = inner
        self._runner = runner

    def build(self, scheduled: Sequence[ScheduledSequence], sampled: Sequence[SamplingRow] = ()) -> StepBatch:
        self._runner.scheduled = list(scheduled)
        return self._inner.build(scheduled, sampled)

    def build_again(self, scheduled: Sequence[ScheduledSequence]) -> StepBatch:
        self._runner.num_again += 1
        self._runner.scheduled = list(scheduled)
        return self._inner.build_again(scheduled)


class _RecordingGpuBuilder(GpuBatchBuilder):
    def __init__(
        self,
        runner: HashRunner,
        max_num_rows: int,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(max_num_rows, max_num_seqs, max_blocks, block_size, accelerator, None, NO_GRAPHS)
        self._runner = runner

    def build(self, scheduled: Sequence[ScheduledSequence], sampled: Sequence[SamplingRow] = ()) -> StepBatch:
        self._runner.scheduled = list(scheduled)
        return super().build(scheduled, sampled)

    def build_ahead(
        self,
        scheduled: Sequence[ScheduledSequence],
        tokens: QueuedTokens,
        chosen_rows: Sequence[int | None],
        sampled: Sequence[SamplingRow] = (),
    ) -> StepBatch:
        self._runner.num_ahead += 1
        return super().build_ahead(scheduled, tokens, chosen_rows, sampled)

    def build_again_ahead(
        self, scheduled: Sequence[ScheduledSequence], tokens: QueuedTokens, sampled: Sequence[SamplingRow]
    ) -> StepBatch:
        self._runner.num_ahead += 1
        self._runner.num_again += 1
        self._runner.scheduled = list(scheduled)
        return super().build_again_ahead(scheduled, tokens, sampled)


class _SamplingBackend(ReferenceBackend):
    """Implements `SamplesOnDevice`."""

    def sample(
        self, logits: Tensor, vocab_size: int, draws: DrawParams | None, edits: LogitEdits | None
    ) -> tuple[Tensor, Tensor]:
        return sample_reference(logits, vocab_size, draws, edits)

    def count_tokens(self, edits: LogitEdits, token_ids: Tensor, is_finite: Tensor) -> None:
        count_tokens_reference(edits, token_ids, is_finite)


def make_hash_engine(
    monkeypatch: pytest.MonkeyPatch,
    *,
    adapters: AdapterMemory | None = None,
    num_blocks: int = 12,
    block_size: int = 4,
    accelerator: Accelerator | None = None,
    num_state_slots: int = 0,
    **overrides: object,
) -> tuple[Engine, HashRunner]:
    """An engine that checks its invariants after every step. Its max_model_len is all that fits its blocks, at most 48.

    accelerator: for a device that also samples. num_state_slots: above 0 for a model with recurrent states.
    """
    settings: dict[str, object] = {"max_num_seqs": 6, "max_num_batched_tokens": 10, "check_invariants": True}
    config = EngineConfig(model="hash", block_size=block_size, **settings | overrides)  # type: ignore[arg-type]
    runner = HashRunner(num_blocks, block_size, None if adapters is None else adapters.table, num_state_slots)
    max_model_len = min(48, num_blocks * block_size)
    max_blocks = -(-max_model_len // block_size)
    sizes = (config.max_num_batched_tokens, config.max_num_seqs, max_blocks, block_size)
    if accelerator is None:
        inner = BatchBuilder(*sizes, has_states=num_state_slots > 0)
        backend, builder = ReferenceBackend(), _RecordingBuilder(inner, runner)
    else:
        backend, builder = _SamplingBackend(), _RecordingGpuBuilder(runner, *sizes, accelerator)
    parts = SimpleNamespace(
        backend=backend,
        description=SimpleNamespace(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            vocab_size=VOCAB_SIZE,
            hidden_size=LOGITS_SIZE,
            eos_token_ids=[EOS],
            num_speculative_tokens=config.num_speculative_tokens or 0,
            layout=SimpleNamespace(fingerprint="hash model"),
        ),
        accelerator=accelerator,
        builder=builder,
        runner=runner,
        adapters=adapters,
        grammars=hash_grammars(),
        free_rows=FreeRows(8, 1e9),
        num_state_slots=num_state_slots,
        logits_size=LOGITS_SIZE,
    )
    monkeypatch.setattr("loraserve.engine.engine.start", lambda config, progress: parts)
    monkeypatch.setattr("loraserve.engine.adapters.memory.UPLOAD_WAIT_S", 60)  # no step with work to do does nothing
    engine = Engine(config, lambda *_: None)
    return engine, runner


@dataclass(slots=True)
class Choice:
    """What one choice received, or must receive."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    pooled: list[float] | None = None
    error: str | None = None
    error_code: EngineErrorCode | None = None

    def take(self, output: SequenceOutput) -> None:
        assert self.finish_reason is None, "an output after the last one"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.finish_reason = output.finish_reason
        self.stop_token_id = output.stop_token_id
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.pooled = None if output.pooled is None else np.frombuffer(output.pooled, np.float32).tolist()
        self.error = output.error
        self.error_code = output.error_code


def approximately(logprob: TokenLogprob) -> TokenLogprob:
    """Compares equal to one of the same token and rank whose numbers a backend has rounded differently."""

    def about(value: float) -> Any:
        return pytest.approx(value, abs=1e-6)

    top = [(token_id, about(value)) for token_id, value in logprob.top]
    return TokenLogprob(logprob.token_id, about(logprob.logprob), logprob.rank, top)


_EXPECTED: dict[tuple[object, ...], Choice] = {}
"""Results by all their inputs: state machines with one seed, and examples derived from others, need them again."""


def expected_choice(request: EngineRequest, index: int, adapter_value: float, max_model_len: int = 48) -> Choice:
    """What choice `index` of a request that is never stopped must receive. The caller must not modify it."""
    if request.pooling is not None:
        return _compute_pooled(request.prompt_token_ids, request.pooling, adapter_value)
    # Params as text, because not all their fields can be hashed.
    key = (*request.prompt_token_ids, repr(request.sampling), index, adapter_value, max_model_len)
    if key not in _EXPECTED:
        _EXPECTED[key] = _compute_choice(
            request.prompt_token_ids, request.sampling, index, adapter_value, max_model_len
        )
    return _EXPECTED[key]


def _compute_pooled(prompt: list[int], params: PoolingParams, adapter_value: float) -> Choice:
    hidden = np.array([logits_after(adapter_value, prompt[: end + 1]) for end in range(len(prompt))])
    vector = hidden.mean(axis=0) if params.pooling is Pooling.MEAN else hidden[-1]
    vector = vector[: params.dimensions]
    if params.normalize:
        vector = vector / np.linalg.norm(vector)
    return Choice(finish_reason=FinishReason.STOP, pooled=pytest.approx(vector.tolist(), rel=1e-5))


def _compute_choice(
    prompt: list[int], params: SamplingParams, index: int, adapter_value: float, max_model_len: int
) -> Choice:
    sampler = Sampler(VOCAB_SIZE, LOGITS_SIZE, ReferenceBackend())
    choice = Choice()
    if params.prompt_logprobs is not None and index == 0:
        rows = np.array([logits_after(adapter_value, prompt[:end]) for end in range(1, len(prompt))], np.float32)
        logits = torch.from_numpy(rows.reshape(-1, LOGITS_SIZE))
        found = sampler.prompt_logprobs(logits, prompt[1:], params.prompt_logprobs)
        choice.prompt_logprobs = [None, *map(approximately, found)]
    while choice.finish_reason is None:
        tokens = prompt + choice.token_ids
        row = SamplingRow(params, params.seed + index, len(tokens), prompt, choice.token_ids, (EOS,))
        logits = logits_after(adapter_value, tokens)
        if params.grammar is not None or params.reasoning_limit is not None:
            allowed = can_come(params, choice.token_ids)
            logits = np.where(np.isin(np.arange(LOGITS_SIZE), allowed), logits, np.float32(-np.inf))
        sampled = sampler.sample(torch.from_numpy(logits[None]), [row])
        token_id, logprob = sampled.token_ids[0], sampled.logprobs[0]
        choice.token_ids = [*choice.token_ids, token_id]
        choice.logprobs += [] if logprob is None else [approximately(logprob)]
        num_output = len(choice.token_ids)
        if num_output >= params.min_tokens and token_id in params.stop_token_ids:
            choice.finish_reason, choice.stop_token_id = FinishReason.STOP, token_id
        elif _is_complete(params, choice.token_ids):
            choice.finish_reason = FinishReason.STOP
        elif num_output == params.max_tokens or len(prompt) + num_output == max_model_len:
            choice.finish_reason = FinishReason.LENGTH
    return choice


def _is_complete(params: SamplingParams, token_ids: Sequence[int]) -> bool:
    """Whether EOS or the grammar ends it."""
    if params.grammar is not None:
        return token_ids[-1] == EOS or can_follow(params.grammar, token_ids) == [EOS]
    return len(token_ids) >= params.min_tokens and token_ids[-1] == EOS and not params.ignore_eos


def run_to_idle(engine: Engine, max_steps: int = 2000) -> dict[tuple[str, int], Choice]:
    """Every choice's outputs, by (request id, index). Fails if a step with work to do does nothing."""
    choices: dict[tuple[str, int], Choice] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return choices
        num_steps = engine.stats().step
        outputs = engine.step()
        assert engine.stats().step > num_steps or outputs, "a step with work to do did nothing"
        for output in outputs:
            choices.setdefault((output.request_id, output.index), Choice()).take(output)
    raise AssertionError(f"not idle after {max_steps} steps")

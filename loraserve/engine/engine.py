"""The engine: requests in, tokens out, one `step` at a time. Synchronous; whoever calls it owns the loop."""

import math
import time
from collections import deque
from collections.abc import Callable

from loraserve_adapters.errors import AdapterError
from loraserve_kernels.sampling import SamplesOnDevice
from torch import Tensor

from loraserve.engine.adapter_memory import AdapterMemory
from loraserve.engine.batch_builder import ScheduledSequence
from loraserve.engine.config import EngineConfig
from loraserve.engine.device_sampler import DeviceSampler
from loraserve.engine.errors import EngineRequestError
from loraserve.engine.kv_blocks import BlockPool, root_hash
from loraserve.engine.queue_stats import queue_stats
from loraserve.engine.request import (
    EngineErrorCode,
    EngineRequest,
    EngineStats,
    FinishReason,
    SequenceOutput,
    TokenLogprob,
)
from loraserve.engine.sampler import Sampler
from loraserve.engine.sampling_row import PenaltyState, SamplingRow
from loraserve.engine.scheduler import Scheduler, StepPlan, running_digests
from loraserve.engine.sequence import RequestState, Sequence, Status
from loraserve.engine.startup import EngineParts, ModelDescription, start

NOT_FINITE_MESSAGE = "the model produced values that are not finite numbers for this request; it was stopped"


class Engine:
    """Schedules, runs and samples. Every method returns quickly except `step`, which runs one forward pass."""

    def __init__(self, config: EngineConfig, progress: Callable[[str, int, int], None]) -> None:
        """progress(phase, done, total) while loading. Raises `EngineStartError`."""
        parts = start(config, progress)
        self._description: ModelDescription = parts.description
        self._runner = parts.runner
        self._adapters: AdapterMemory | None = parts.adapters
        self._check_invariants = config.check_invariants
        self._max_num_seqs = config.max_num_seqs
        self._block_size = config.block_size
        self._pool = BlockPool(parts.num_blocks, config.enable_prefix_caching)
        self._scheduler = Scheduler(
            pool=self._pool,
            block_size=config.block_size,
            adapters=parts.adapters,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_loras=config.max_loras,
        )
        self._builder = parts.builder
        self._sampler = Sampler(
            parts.description.vocab_size, parts.logits_size, parts.backend.argmax, _device_sampler(parts, config)
        )
        self._eos = tuple(parts.description.eos_token_ids)
        self._states: dict[str, RequestState] = {}
        self._num_live_requests: dict[str, int] = {}
        """By adapter digest."""
        self._unloading: set[str] = set()
        self._unloaded: list[str] = []
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._recent_step_tokens: deque[int] = deque(maxlen=1024)

    def describe(self) -> ModelDescription:
        return self._description

    # ---- requests

    def add_request(self, request: EngineRequest) -> None:
        """Raises `EngineRequestError` and changes nothing when the request cannot be served."""
        self._validate(request)
        digest = request.adapter_digest
        state = RequestState(
            request,
            arrival_s=time.monotonic(),
            root_hash=root_hash(request.cache_salt, self._description.layout.fingerprint, digest),
        )
        state.sequences.append(
            Sequence(state, 0, list(request.prompt_token_ids), num_prompt_tokens=len(request.prompt_token_ids))
        )
        self._states[request.request_id] = state
        if digest is not None:
            self._num_live_requests[digest] = self._num_live_requests.get(digest, 0) + 1
            if self._adapters is not None:
                self._adapters.prefetch(digest)
        self._scheduler.add(state)

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        """Stop a request, or one choice of it, and free all it holds. A no-op for what is unknown or finished."""
        state = self._states.get(request_id)
        if state is None:
            return []
        if index is None or state.unfinished == {index}:
            return self._end_request(state, FinishReason.ABORT)
        if index not in state.unfinished:
            return []
        if state.is_forked:
            self._finish(next(sequence for sequence in state.sequences if sequence.index == index))
        else:
            # Not to be forked; the first choice goes on computing the prompt for the others.
            state.unfinished.discard(index)
        return [SequenceOutput(request_id, index, [], finish_reason=FinishReason.ABORT)]

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    # ---- adapters

    def load_adapter(self, digest: str, packed_path: str) -> None:
        """Make an adapter usable; it enters the arena at first use. Raises `AdapterError`."""
        if self._adapters is None:
            raise AdapterError("lora_disabled", "the engine was started without LoRA (--no-enable-lora)")
        self._adapters.add(digest, packed_path)
        self._unloading.discard(digest)

    def unload_adapter(self, digest: str) -> None:
        """Refuse new requests for it now; `take_unloaded` reports it once the last one has finished."""
        self._unloading.add(digest)
        self._finish_unload(digest)

    def take_unloaded(self) -> list[str]:
        """Digests whose unload completed since the last call."""
        unloaded, self._unloaded = self._unloaded, []
        return unloaded

    # ---- the step

    def step(self) -> list[SequenceOutput]:
        """Compute one batch and return what every choice gained."""
        plan = self._scheduler.schedule()
        outputs = [
            output
            for sequence, message in plan.failed
            for output in self._end_request(
                sequence.state, FinishReason.ERROR, message, EngineErrorCode.ADAPTER_UNREADABLE
            )
        ]
        if plan.failed:  # a sibling of one that failed may have been admitted, if the adapter could be read then
            plan.scheduled = [item for item in plan.scheduled if item.sequence.status is Status.RUNNING]
        if plan.scheduled:
            outputs += self._run(plan)
        elif self._adapters is not None and not outputs:
            self._adapters.wait_for_upload()  # nothing else can be done
        if self._check_invariants:
            self._scheduler.check_invariants()
        return outputs

    def _run(self, plan: StepPlan) -> list[SequenceOutput]:
        now = time.monotonic()
        if plan.block_copies:
            self._runner.copy_blocks(plan.block_copies)
        logits = self._runner.forward(self._builder.build(plan.scheduled))
        self._num_steps += 1
        self._recent_step_tokens.append(sum(item.num_rows for item in plan.scheduled))
        sequences: list[Sequence] = []
        rows: list[int] = []
        end_row = 0
        for item in plan.scheduled:
            start_row, end_row = end_row, end_row + item.num_sampled_rows
            for sequence in self._account(item, logits, start_row, now):
                sequences.append(sequence)
                rows.append(end_row - 1)
        if not sequences:
            return []
        sampled_logits = logits if rows == list(range(end_row)) else logits[rows]
        sampled = self._sampler.sample(sampled_logits, [self._sampling_row(sequence) for sequence in sequences])
        outputs = []
        for sequence, token_id, logprob, is_finite in zip(
            sequences, sampled.token_ids, sampled.logprobs, sampled.is_finite, strict=True
        ):
            if sequence.status is Status.FINISHED:
                continue  # a sibling's values were not finite
            if is_finite:
                self._scheduler.computed(sequence, 0, is_finite=True)
                outputs.append(self._append(sequence, token_id, logprob))
            else:
                outputs += self._fail_not_finite(sequence)
        return outputs

    def _account(self, item: ScheduledSequence, logits: Tensor, start_row: int, now: float) -> list[Sequence]:
        """Note what was computed; returns the sequences to sample from the item's last row.

        start_row: the item's first row of the logits.
        """
        sequence, state = item.sequence, item.sequence.state
        if state.first_scheduled_s is None:
            state.first_scheduled_s = now
        if sequence.num_output_tokens == 0:
            self._num_prompt_tokens += item.num_rows
        if state.wants_prompt_logprobs and item.num_sampled_rows > 0 and sequence.index == 0:
            self._add_prompt_logprobs(sequence, logits[start_row : start_row + item.num_sampled_rows], item.num_rows)
        self._scheduler.computed(sequence, item.num_rows, is_finite=None)
        if sequence.num_uncomputed_tokens > 0:
            return []
        return [sequence] if state.is_forked else self._scheduler.fork(sequence)

    def _add_prompt_logprobs(self, sequence: Sequence, logits: Tensor, num_rows: int) -> None:
        """Rows at positions p predict the prompt's token p + 1; the prompt's last row is sampled instead."""
        state = sequence.state
        if state.has_all_prompt_logprobs:
            return
        if state.prompt_logprobs is None:
            state.prompt_logprobs = [None]
        start = sequence.num_computed_tokens
        targets = sequence.token_ids[start + 1 : min(start + num_rows + 1, sequence.num_prompt_tokens)]
        num_top = sequence.request.sampling.prompt_logprobs or 0
        if targets:
            state.prompt_logprobs += self._sampler.prompt_logprobs(logits[: len(targets)], targets, num_top)

    def _sampling_row(self, sequence: Sequence) -> SamplingRow:
        row = sequence.sampling_row
        if row is None:
            params, prompt = sequence.request.sampling, sequence.request.prompt_token_ids
            row = sequence.sampling_row = SamplingRow(
                params=params,
                seed=params.seed + sequence.index,
                position=0,
                prompt_token_ids=prompt,
                output_token_ids=(),
                eos_token_ids=self._eos,
                penalty_state=PenaltyState(prompt) if params.has_penalties else None,
            )
        row.position = len(sequence.token_ids)
        if row.needs_outputs:
            row.output_token_ids = sequence.token_ids[sequence.num_prompt_tokens :]
        return row

    def _append(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> SequenceOutput:
        sequence.token_ids.append(token_id)
        self._num_generation_tokens += 1
        finish_reason, stop_token_id = self._finish_reason(sequence, token_id)
        if finish_reason is not None:
            self._finish(sequence)
        state = sequence.state
        is_first = not sequence.is_first_output_sent
        sequence.is_first_output_sent = True
        assert state.first_scheduled_s is not None
        return SequenceOutput(
            request_id=state.request.request_id,
            index=sequence.index,
            token_ids=[token_id],
            logprobs=None if logprob is None else [logprob],
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=state.num_cached_tokens if is_first and sequence.index == 0 else 0,
            prompt_logprobs=state.prompt_logprobs if is_first and sequence.index == 0 else None,
            queue_s=state.first_scheduled_s - state.arrival_s if is_first else None,
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        params = sequence.request.sampling
        num_tokens = len(sequence.token_ids)
        num_output_tokens = num_tokens - sequence.num_prompt_tokens
        if num_output_tokens >= params.min_tokens:
            if token_id in params.stop_token_ids:
                return FinishReason.STOP, token_id
            if token_id in self._eos and not params.ignore_eos:
                return FinishReason.STOP, None
        if num_output_tokens >= params.max_tokens or num_tokens >= self._description.max_model_len:
            return FinishReason.LENGTH, None
        return None, None

    # ---- endings

    def _fail_not_finite(self, sequence: Sequence) -> list[SequenceOutput]:
        """End the whole request; its blocks are wiped and never found again."""
        blocks = {block for choice in sequence.state.sequences for block in choice.blocks}
        self._pool.forget(sorted(blocks))
        private = [block for block in sorted(blocks) if not self._is_shared_outside(block, sequence.state)]
        outputs = self._end_request(sequence.state, FinishReason.ERROR, NOT_FINITE_MESSAGE, EngineErrorCode.NOT_FINITE)
        self._runner.zero_blocks(private)
        return outputs

    def _is_shared_outside(self, block: int, state: RequestState) -> bool:
        return any(block in other.blocks for other in self._scheduler.running if other.state is not state)

    def _end_request(
        self,
        state: RequestState,
        reason: FinishReason,
        error: str | None = None,
        error_code: EngineErrorCode | None = None,
    ) -> list[SequenceOutput]:
        """Finish every choice that is not, including those that were never forked."""
        if not state.unfinished:
            return []
        indexes = sorted(state.unfinished)
        state.unfinished.clear()
        for sequence in state.sequences:
            if sequence.status is not Status.FINISHED:
                self._scheduler.finish(sequence)
        self._forget_request(state)
        return [
            SequenceOutput(
                state.request.request_id, index, [], finish_reason=reason, error=error, error_code=error_code
            )
            for index in indexes
        ]

    def _finish(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        state = sequence.state
        state.unfinished.discard(sequence.index)
        if not state.unfinished:
            self._forget_request(state)

    def _forget_request(self, state: RequestState) -> None:
        del self._states[state.request.request_id]
        digest = state.request.adapter_digest
        if digest is not None:
            self._num_live_requests[digest] -= 1
            if self._num_live_requests[digest] == 0:
                del self._num_live_requests[digest]
                if digest in self._unloading:
                    self._finish_unload(digest)

    def _finish_unload(self, digest: str) -> None:
        if digest in self._num_live_requests:
            return
        if self._adapters is not None:
            self._adapters.remove(digest)
        self._unloading.discard(digest)
        self._unloaded.append(digest)

    # ---- checks and statistics

    def _validate(self, request: EngineRequest) -> None:
        """The API has checked all this; the engine trusts nobody with an index into a tensor."""
        params, description = request.sampling, self._description
        num_prompt = len(request.prompt_token_ids)
        if request.request_id in self._states:
            raise EngineRequestError(f"request id {request.request_id!r} is in use")
        if not 1 <= num_prompt < description.max_model_len:
            raise EngineRequestError(
                f"the prompt has {num_prompt} tokens; 1 to {description.max_model_len - 1} are possible"
            )
        if params.max_tokens < 1:
            raise EngineRequestError(f"max_tokens is {params.max_tokens}; at least 1 is needed")
        if not 1 <= params.n <= self._max_num_seqs:
            raise EngineRequestError(f"n is {params.n}; 1 to {self._max_num_seqs} (--max-num-seqs) are possible")
        ids = [*request.prompt_token_ids, *params.stop_token_ids, *params.allowed_token_ids, *params.logit_bias]
        if min(ids) < 0 or max(ids) >= description.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < description.vocab_size)
            raise EngineRequestError(f"token id {wrong} is outside the vocabulary (0 to {description.vocab_size - 1})")
        if not 0 < request.tenant_weight < math.inf:
            raise EngineRequestError(f"the tenant's weight is {request.tenant_weight}; it must be above 0")
        digest = request.adapter_digest
        if digest is not None and (
            self._adapters is None or not self._adapters.knows(digest) or digest in self._unloading
        ):
            raise EngineRequestError(f"adapter {digest[:12]} is not loaded", EngineErrorCode.ADAPTER_NOT_LOADED)

    def stats(self) -> EngineStats:
        """A snapshot; `recent_step_tokens` starts anew with each."""
        recent_step_tokens = list(self._recent_step_tokens)
        self._recent_step_tokens.clear()
        counts = self._pool.counts()
        scheduler, adapters = self._scheduler, self._adapters
        return EngineStats(
            step=self._num_steps,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=self._pool.num_blocks,
            num_free_blocks=counts.free,
            num_cached_blocks=counts.cached,
            block_size=self._block_size,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            arena_size_bytes=0 if adapters is None else adapters.size_bytes,
            arena_used_bytes=0 if adapters is None else adapters.used_bytes,
            num_adapter_loads=0 if adapters is None else adapters.num_loads,
            num_adapter_evictions=0 if adapters is None else adapters.num_evictions,
            running_adapters=running_digests(scheduler.running),
            waiting_adapters=running_digests(list(scheduler.waiting)),
            resident_adapters=[] if adapters is None else adapters.resident,
            resident_extents=[] if adapters is None else adapters.extents,
            queues=queue_stats([*scheduler.running, *scheduler.waiting]),
            recent_step_tokens=recent_step_tokens,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError. Idle: nothing is referenced."""
        self._scheduler.check_invariants()


def _device_sampler(parts: EngineParts, config: EngineConfig) -> DeviceSampler | None:
    """None where logits are on the host, or the backend cannot sample."""
    if parts.accelerator is None or not isinstance(parts.backend, SamplesOnDevice):
        return None
    return DeviceSampler(parts.backend, parts.accelerator, parts.description.vocab_size, config.max_num_seqs)

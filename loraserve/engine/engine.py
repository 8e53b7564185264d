"""The engine: requests in, tokens out, one `step` at a time. Synchronous; the caller owns the loop."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice

import numpy as np
import torch
from loraserve_kernels.sampling import SamplesOnDevice
from numpy.typing import NDArray

from loraserve.engine.activation import last_invocation
from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.adapters.users import AdapterUsers
from loraserve.engine.config import EngineConfig
from loraserve.engine.engine_stats import EngineCounts, engine_stats
from loraserve.engine.errors import EngineRequestError, EngineStepError
from loraserve.engine.gpu_memory import STEP_OUT_OF_MEMORY_ADVICE
from loraserve.engine.grammars.matcher import OutputMatcher
from loraserve.engine.grammars.reasoning_limit import ReasoningLimiter
from loraserve.engine.kv.blocks import BlockPool, root_hash
from loraserve.engine.kv.states import StatePool
from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import (
    BegunPrompt,
    EngineErrorCode,
    EngineRequest,
    EngineStats,
    FinishReason,
    SequenceOutput,
    TokenLogprob,
)
from loraserve.engine.request_check import check_request
from loraserve.engine.sampling.device_sampler import DeviceSampler, QueuedTokens
from loraserve.engine.sampling.sampler import Sampler
from loraserve.engine.scheduling.drafter import Drafter
from loraserve.engine.scheduling.endings import Endings
from loraserve.engine.scheduling.plan import ScheduledSequence, StepPlan
from loraserve.engine.scheduling.scheduler import Scheduler
from loraserve.engine.scheduling.sequence import RequestState, Sequence, Status
from loraserve.engine.scheduling.sequence_states import SequenceStates
from loraserve.engine.startup import EngineParts, start
from loraserve.engine.steps.in_flight import StepInFlight
from loraserve.engine.steps.pooling import PooledPrompt
from loraserve.engine.steps.queue import StepQueue

ChosenToken = tuple[int, TokenLogprob | None, bool]
"""(Token id, its log-probability, whether its logits were finite)."""
NOT_FINITE_MESSAGE = "the model produced non-finite values (NaN or infinity) for this request, which was stopped"
_NO_EMBEDDING = (
    "the grammar requires token {token_id} next, but the model has embeddings only for token ids below {num_embeddings}"
)


class Engine:
    """Schedules, runs and samples. Every method returns quickly except `step`, which waits for one forward pass."""

    def __init__(self, config: EngineConfig, progress: Callable[[str, int, int], None]) -> None:
        """progress(phase, done, total) while loading. Raises `EngineStartError`."""
        parts = start(config, progress)
        self._description: ModelDescription = parts.description
        self._runner = parts.runner
        self._adapters: AdapterMemory | None = parts.adapters
        self._grammars = parts.grammars
        self._check_invariants = config.check_invariants
        self._pool = BlockPool(parts.description.num_blocks, config.enable_prefix_caching)
        max_num_seqs, num_slots = parts.description.max_num_seqs, parts.num_state_slots
        self._state_pool = StatePool(num_slots, max_num_seqs) if num_slots > 0 else None
        self._scheduler = Scheduler(
            pool=self._pool,
            block_size=config.block_size,
            adapters=parts.adapters,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_loras=config.max_loras,
            states=SequenceStates(self._state_pool, config.block_size, saves=config.enable_prefix_caching),
        )
        eos_token_ids = tuple(parts.description.eos_token_ids)
        self._endings = Endings(eos_token_ids, parts.description.max_model_len)
        self._steps = StepQueue(
            scheduler=self._scheduler,
            adapters=parts.adapters,
            builder=parts.builder,
            runner=parts.runner,
            sampler=_sampler(parts, config),
            eos_token_ids=eos_token_ids,
        )
        self._drafter = _drafter(parts, config, self._scheduler, self._endings)
        self._in_flight: StepInFlight | None = None
        """Queued by the last `step` after the one it collected. Between calls, no other step is in progress."""
        self._states: dict[str, RequestState] = {}
        self._compiling: dict[RequestState, Future[OutputMatcher]] = {}
        """Requests to be scheduled as soon as their grammar is compiled."""
        self.on_prompts_begun: Callable[[list[BegunPrompt]], None] = lambda _: None
        """Called within `step`, before the forward pass that computes the first part of these prompts."""
        self._users = AdapterUsers(parts.adapters)
        self._counts = EngineCounts()

    def describe(self) -> ModelDescription:
        return self._description

    # ---- requests

    def add_request(self, request: EngineRequest) -> None:
        """Raises `EngineRequestError` and changes nothing when the request cannot be served."""
        self._validate(request)
        grammar, digest = request.sampling.grammar, request.adapter_digest
        adapter_start = self._adapter_start(request)
        state = RequestState(
            request,
            arrival_s=time.monotonic(),
            root_hash=root_hash(
                request.cache_salt, self._description.layout.fingerprint, None if adapter_start > 0 else digest
            ),
            adapter_start=adapter_start,
        )
        state.sequences.append(
            Sequence(state, 0, list(request.prompt_token_ids), num_prompt_tokens=len(request.prompt_token_ids))
        )
        self._states[request.request_id] = state
        if digest is not None:
            self._users.enter(digest)
        if grammar is None:
            self._add(state, None)
        else:
            self._compiling[state] = self._grammars.compile(grammar, request.tenant)

    def _add(self, state: RequestState, grammar: OutputMatcher | None) -> None:
        limit = state.request.sampling.reasoning_limit
        limited = None if limit is None else ReasoningLimiter(limit, self._description.vocab_size, grammar)
        state.sequences[0].matcher = limited or grammar
        self._scheduler.add(state)

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        """Stop a request or one of its choices, and free all it holds. A no-op if it is unknown or finished."""
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
            # It will not be forked; the first choice goes on computing the prompt for the others.
            self._scheduler.abandon_choice(state, index)
        return [SequenceOutput(request_id, index, [], finish_reason=FinishReason.ABORT)]

    def has_work(self) -> bool:
        return self._scheduler.has_work() or bool(self._compiling)

    def use_idle_time(self) -> bool:
        """Prepare for future work, a few milliseconds at most; returns False if nothing is left to prepare now.

        Touches memory for KV blocks, recurrent states and adapters that was never used.
        """
        num_states = 0 if self._state_pool is None else self._state_pool.num_ever_allocated
        if self._runner.touch_ahead(self._pool.num_ever_allocated, num_states):
            return True
        return self._adapters is not None and self._adapters.touch_ahead()

    # ---- adapters

    def load_adapter(self, digest: str, packed_path: str) -> None:
        """Make an adapter usable; it enters the arena at first use. Raises `AdapterError`."""
        self._users.load(digest, packed_path)

    def unload_adapter(self, digest: str) -> None:
        """Refuse new requests for it now; `take_unloaded` reports it once the last one has finished."""
        self._users.unload(digest)

    def take_unloaded(self) -> list[str]:
        """Digests whose unload completed since the last call."""
        return self._users.take_unloaded()

    # ---- the step

    def step(self) -> list[SequenceOutput]:
        """Compute one batch and return the new output of every choice.

        If possible, queues the next batch before waiting for this one. Raises `EngineStepError` if the GPU runs out of
        memory; the engine cannot go on then.
        """
        try:
            return self._step()
        except torch.OutOfMemoryError as error:
            raise EngineStepError(
                f"the GPU does not have enough memory for a step: {STEP_OUT_OF_MEMORY_ADVICE} ({error})"
            ) from error

    def _step(self) -> list[SequenceOutput]:
        outputs = self._take_compiled()
        step, self._in_flight = self._in_flight, None
        if step is None or not step.is_wanted:
            plan = self._scheduler.schedule()
            if self._drafter is not None:
                self._drafter.add_drafts(plan.scheduled)
            step, failures = self._start_step(plan)
            outputs += failures
        if step is not None:
            if isinstance(step.sampled, QueuedTokens) and not step.is_awaited:
                plan = self._scheduler.try_schedule_ahead(self._endings.ends_with_next)
                if plan is not None:
                    self._in_flight, failures = self._start_step(plan, step)
                    outputs += failures
            outputs += self._collect(step)
        elif not outputs:
            self._wait()  # nothing else can be done
        if self._check_invariants:
            self._scheduler.check_invariants()
        return outputs

    def _take_compiled(self) -> list[SequenceOutput]:
        """Schedule the requests whose grammars are compiled; returns the outputs of those whose grammar failed."""
        outputs: list[SequenceOutput] = []
        for state, compiled in [*self._compiling.items()]:
            if not compiled.done():
                continue
            if error := compiled.exception():
                outputs += self._end_request(state, FinishReason.ERROR, str(error), EngineErrorCode.GRAMMAR)
                continue
            del self._compiling[state]
            self._grammars.forget_costly()
            self._add(state, compiled.result().copy())
        return outputs

    def _wait(self) -> None:
        """Wait for a grammar or an adapter, a few milliseconds at most."""
        if self._compiling:
            self._grammars.wait(self._compiling.values())
        elif self._adapters is not None:
            self._adapters.wait_for_upload()

    def _start_step(
        self, plan: StepPlan, before: StepInFlight | None = None
    ) -> tuple[StepInFlight | None, list[SequenceOutput]]:
        """Returns (the step queued after `before`, the outputs of requests that failed)."""
        if plan.begun:
            self.on_prompts_begun(plan.begun)
        outputs = [
            output
            for sequence, message in plan.failed
            for output in self._end_request(
                sequence.state, FinishReason.ERROR, message, EngineErrorCode.ADAPTER_UNREADABLE
            )
        ]
        if plan.failed:  # a sibling of a failed one may have been admitted, if the adapter could be read then
            plan.scheduled = [item for item in plan.scheduled if item.sequence.status is Status.RUNNING]
        return self._steps.queue(plan, before) if plan.scheduled else None, outputs

    def _collect(self, step: StepInFlight) -> list[SequenceOutput]:
        self._counts.num_steps += 1
        self._counts.recent_step_tokens.append(step.num_rows)
        sampled = step.wait()
        if step.takes_best and all(sampled.is_finite):
            return self._append_each(step.sequences, sampled.token_ids)
        outputs: list[SequenceOutput] = []
        rows = zip(sampled.token_ids, sampled.logprobs, sampled.is_finite, strict=True)
        for sequence, item, chosen in zip(step.sequences, step.items, rows, strict=False):
            after_draft = list(islice(rows, len(item.draft))) if item.draft else []
            if sequence.status is Status.FINISHED:
                continue  # it ended while the step was queued, or a sibling's values were not finite
            if item.draft:
                outputs += self._take_drafted(sequence, chosen, item, after_draft)
            else:
                outputs += self._take_token(sequence, chosen)
        for prompt in step.pooled:
            outputs += self._take_pooled(prompt)
        return outputs

    def _take_pooled(self, prompt: PooledPrompt) -> list[SequenceOutput]:
        sequence = prompt.sequence
        if sequence.status is Status.FINISHED:
            return []
        if not prompt.is_finite:
            return self._fail_not_finite(sequence)
        self._scheduler.remember_blocks(sequence)
        output = SequenceOutput(
            sequence.request.request_id, sequence.index, [], finish_reason=FinishReason.STOP, pooled=prompt.vector
        )
        self._finish(sequence)
        return [output]

    def _take_drafted(
        self, sequence: Sequence, chosen: ChosenToken, item: ScheduledSequence, after_draft: list[ChosenToken]
    ) -> list[SequenceOutput]:
        """after_draft: for each drafted token, the token chosen to follow it."""
        place = sequence.num_tokens
        outputs = self._take_token(sequence, chosen)
        num_accepted = 0
        for drafted, after in zip(item.draft, after_draft, strict=True):
            if outputs[-1].error is not None or sequence.token_ids[place] != drafted:
                break
            num_accepted += 1
            if sequence.status is Status.FINISHED:
                break
            self._scheduler.note_accepted(sequence)
            place += 1
            if place == sequence.num_tokens:  # else the grammar has already forced this token
                gained = self._take_token(sequence, after)
                if gained[0].error is None:
                    outputs[0].extend(gained[0])
                else:
                    outputs += gained
        self._counts.num_accepted_tokens += num_accepted
        if item.is_predicted:
            sequence.num_predicted_tokens += len(item.draft)
            sequence.num_accepted_tokens += num_accepted
        outputs[0].num_predicted_tokens = sequence.num_predicted_tokens
        outputs[0].num_accepted_tokens = sequence.num_accepted_tokens
        return outputs

    def _take_token(self, sequence: Sequence, chosen: ChosenToken) -> list[SequenceOutput]:
        token_id, logprob, is_finite = chosen
        if not is_finite:
            return self._fail_not_finite(sequence)
        matcher = sequence.matcher
        if matcher is not None and not matcher.take(token_id):
            self._forget_grammar(sequence.request)
            return self._end_request(sequence.state, FinishReason.ERROR, matcher.error, EngineErrorCode.GRAMMAR)
        self._scheduler.remember_blocks(sequence)
        return [self._append(sequence, token_id, logprob)]

    def _append_each(self, sequences: list[Sequence], token_ids: list[int]) -> list[SequenceOutput]:
        """`_collect` for a step with exactly one token per sequence and nothing else."""
        outputs: list[SequenceOutput] = []
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            if sequence.status is not Status.FINISHED:
                self._scheduler.remember_blocks(sequence)
                outputs.append(self._append(sequence, token_id, None))
        return outputs

    def _append(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> SequenceOutput:
        sequence.token_ids.append(token_id)
        self._counts.num_generation_tokens += 1
        finish_reason, stop_token_id = self._endings.reason(sequence, token_id)
        output = SequenceOutput(sequence.request.request_id, sequence.index, [token_id])
        if sequence.matcher is not None and finish_reason is not FinishReason.STOP:
            finish_reason, stop_token_id = self._follow_grammar(sequence, sequence.matcher, finish_reason, output)
        if logprob is not None:
            output.logprobs = [logprob]
        if finish_reason is not None:
            self._finish(sequence)
            output.finish_reason, output.stop_token_id = finish_reason, stop_token_id
        if not sequence.is_first_output_sent:
            sequence.is_first_output_sent = True
            if sequence.index == 0:
                output.prompt_logprobs = sequence.state.prompt_logprobs
        return output

    def _follow_grammar(
        self, sequence: Sequence, matcher: OutputMatcher, finish_reason: FinishReason | None, output: SequenceOutput
    ) -> tuple[FinishReason | None, int | None]:
        """Append tokens that the grammar or the limit of reasoning forces, unless log-probabilities are requested.
        Returns the ending, as `Endings.reason`."""
        stop_token_id = None
        forced = [] if sequence.request.sampling.logprobs is not None else matcher.forced_tokens()
        for token_id in forced:
            if finish_reason is not None or token_id >= self._description.vocab_size or not matcher.take(token_id):
                break
            sequence.token_ids.append(token_id)
            output.token_ids.append(token_id)
            self._counts.num_generation_tokens += 1
            finish_reason, stop_token_id = self._endings.reason(sequence, token_id)
        if matcher.is_complete and finish_reason is not FinishReason.STOP:
            return FinishReason.STOP, None
        return finish_reason, stop_token_id

    def _forget_grammar(self, request: EngineRequest) -> None:
        assert request.sampling.grammar is not None
        self._grammars.forget(request.sampling.grammar, request.tenant)

    # ---- endings

    def _fail_not_finite(self, sequence: Sequence) -> list[SequenceOutput]:
        """End the whole request. Its blocks are never found again, and those not shared with others are wiped.

        A row also counts as not finite if its grammar allows no token that the model has.
        """
        blocks = {block for choice in sequence.state.sequences for block in choice.blocks}
        self._pool.forget(sorted(blocks))
        private = [block for block in sorted(blocks) if not self._is_shared_outside(block, sequence.state)]
        error, error_code = NOT_FINITE_MESSAGE, EngineErrorCode.NOT_FINITE
        vocab_size = self._description.vocab_size
        mask = None if sequence.matcher is None else sequence.matcher.mask()
        token_id = None if mask is None else _first_allowed(mask)
        if token_id is not None and token_id >= vocab_size:
            error = _NO_EMBEDDING.format(token_id=token_id, num_embeddings=vocab_size)
            error_code = EngineErrorCode.GRAMMAR
        outputs = self._end_request(sequence.state, FinishReason.ERROR, error, error_code)
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
        """Finish every unfinished choice, including those that were never forked."""
        if not state.unfinished:
            return []
        indexes = sorted(state.unfinished)
        state.unfinished.clear()
        compiled = self._compiling.pop(state, None)
        is_scheduled = compiled is None
        if compiled is not None and compiled not in self._compiling.values():
            compiled.cancel()  # unless it has started
        for sequence in state.sequences:
            if is_scheduled and sequence.status is not Status.FINISHED:
                self._scheduler.finish(sequence)
        self._forget_request(state)
        return [
            SequenceOutput(
                state.request.request_id,
                index,
                [],
                finish_reason=reason,
                error=error,
                error_code=error_code,
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
        # They point back at it: otherwise all that a request holds, its prompt too, waits for the garbage collector.
        state.sequences = []
        if not self._scheduler.running:
            self._steps.forget()
        digest = state.request.adapter_digest
        if digest is not None:
            self._users.leave(digest)

    # ---- checks and statistics

    def _validate(self, request: EngineRequest) -> None:
        if request.request_id in self._states:
            raise EngineRequestError(f"request id {request.request_id!r} is in use")
        check_request(request, self._description)
        digest = request.adapter_digest
        if digest is not None and not self._users.can_enter(digest):
            raise EngineRequestError(f"adapter {digest[:12]} is not loaded", EngineErrorCode.ADAPTER_NOT_LOADED)
        is_to_classify = request.pooling is not None and request.pooling.labels is not None
        if is_to_classify and (digest is None or not self._users.is_classifier(digest)):
            raise EngineRequestError("a classification request needs an adapter that is a classifier")

    def _adapter_start(self, request: EngineRequest) -> int:
        """`RequestState.adapter_start`. Raises `EngineRequestError` if an activated LoRA would change nothing."""
        digest = request.adapter_digest
        invocation = () if digest is None else self._users.invocation_of(digest)
        if not invocation:
            return 0
        start = last_invocation(request.prompt_token_ids, invocation)
        if start is None:
            raise EngineRequestError(f"the prompt does not contain the adapter's invocation tokens {list(invocation)}")
        return start

    def stats(self, *, list_residents: bool = True) -> EngineStats:
        """A snapshot; each one restarts `recent_step_tokens`."""
        return engine_stats(
            self._counts,
            self._pool,
            self._scheduler,
            [*self._scheduler.waiting.in_any_order(), *(state.sequences[0] for state in self._compiling)],
            self._adapters,
            num_prompt_tokens=self._steps.num_prompt_tokens,
            num_draft_tokens=0 if self._drafter is None else self._drafter.num_tokens,
            list_residents=list_residents,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError. In an idle engine, nothing may be referenced."""
        self._scheduler.check_invariants()


def _first_allowed(mask: NDArray[np.uint8]) -> int | None:
    """The lowest token id that a mask of `OutputMatcher` allows."""
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    return int(allowed[0]) if len(allowed) else None


def _drafter(parts: EngineParts, config: EngineConfig, scheduler: Scheduler, endings: Endings) -> Drafter | None:
    max_length = parts.description.num_speculative_tokens
    if max_length == 0:
        return None
    return Drafter(
        scheduler,
        endings,
        max_length=max_length,
        free_rows=parts.free_rows,
        max_num_rows=config.max_num_batched_tokens,
    )


def _sampler(parts: EngineParts, config: EngineConfig) -> Sampler:
    """Samples on the device if the logits are there and the backend can sample."""
    vocab_size, device = parts.description.vocab_size, None
    if parts.accelerator is not None and isinstance(parts.backend, SamplesOnDevice):
        device = DeviceSampler(parts.backend, parts.accelerator, vocab_size, config.max_num_seqs)
    return Sampler(vocab_size, parts.logits_size, parts.backend, device)

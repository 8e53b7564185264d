"""Decides what each step computes.

There are no prefill and decode phases: every sequence catches up its computed tokens to its tokens under one token
budget, which covers chunked prompts, prefix hits and recompute after preemption.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from enum import Enum

from loraserve_adapters.errors import AdapterError

from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.kv.blocks import BlockPool
from loraserve.engine.request import BegunPrompt, EngineRequest
from loraserve.engine.scheduling.fair_queue import FairQueue
from loraserve.engine.scheduling.plan import ScheduledSequence, StepPlan
from loraserve.engine.scheduling.sequence import RequestState, Sequence, Status
from loraserve.engine.scheduling.sequence_blocks import SequenceBlocks

MAX_BYPASSED = 64
"""Admissions that may pass a request whose adapter does not fit; then nobody is admitted before it."""
COLD_LOAD_TOKENS = 32
"""What loading a cold adapter adds to its tenant's counter, in tokens."""
HIDDEN_COPY_BYTES = 1 << 20
"""What is copied to a GPU while it computes a row of a prompt: at 50 GB/s 21 µs, at 600 TFLOP/s a row of an 8B model
takes 27, and a smaller model has smaller adapters. Estimated. NOTE: a step that is a graph begins behind the copy, so
that it is a bound on what others wait for there, in place of the host's launches."""
MAX_PROMPT_LOGPROB_ROWS = 256
"""Rows of one sequence in one step whose logits are kept for prompt logprobs: each costs a row of the vocabulary."""
LONG_PROMPT_SHARE = 2
"""A prompt that is being computed gets no more than a step's rows divided by this while another tenant waits
that was not served more: its short prompts would wait for the whole of a long one."""
MAX_CLOSED_STEPS = 16
"""Steps after which those for whom there was no room are tried again though nobody left: whose turn it is changes."""


class _Admission(Enum):
    ADMITTED = "admitted"
    NO_ROOM = "no room"
    NO_ADAPTER_ROOM = "no adapter room"
    FAILED = "failed"


class Scheduler:
    """Owns the waiting and running sequences and, through them, every reference to blocks and adapters."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        block_size: int,
        adapters: AdapterMemory | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_loras: int | None,
    ) -> None:
        self.pool = pool
        self.running: list[Sequence] = []
        """In order of admission."""
        self.waiting = FairQueue()
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._blocks = SequenceBlocks(pool, block_size)
        self._block_size = block_size
        self._adapters = adapters
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_loras = max_loras
        self._num_admitted = 0
        self._num_closed_steps = 0
        """So many more steps need not look for somebody to admit, unless somebody or an adapter comes or goes."""

    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, state: RequestState) -> None:
        """Queue the request's first choice; the others are forked from it when the prompt is computed."""
        sequence = state.sequences[0]
        self.waiting.arrive(state.request.tenant)
        self.waiting.append(sequence)
        self._num_closed_steps = 0

    def schedule(self) -> StepPlan:
        """NOTE: not while a step is queued whose tokens are unknown: a sequence of it may be preempted."""
        plan = StepPlan()
        num_preempted_before = self.num_preemptions
        if not self._try_schedule_rows(self.running, plan):
            self._schedule_each(self.running, plan)
        if self.num_preemptions != num_preempted_before:
            self._num_closed_steps = 0
        else:
            self._admit_waiting(self.running, plan)
        plan.scheduled.sort(key=lambda item: item.sequence.adapter_slot)
        return plan

    def try_schedule_ahead(self, ends: Callable[[Sequence], bool]) -> StepPlan | None:
        """What to compute behind a step that is queued and whose tokens are unknown, as if none of them ended anybody.

        ends: whether a sequence's next token is its last one, whatever it is. A sequence of whose tokens none is left
        to compute gets a row for the token that it is about to get.

        None, and nothing is changed, where somebody may have to be preempted.
        """
        going_on = [each for each in self.running if each.num_uncomputed_tokens > 0 or not ends(each)]
        plan = StepPlan()
        if not self._try_schedule_rows(going_on, plan):
            if not self._has_blocks(going_on):
                return None
            self._schedule_each(going_on, plan)
        self._admit_waiting(going_on, plan)
        plan.scheduled.sort(key=lambda item: item.sequence.adapter_slot)
        return plan

    def fork(self, parent: Sequence) -> list[Sequence]:
        """The request's choices that are not finished: the parent itself and others, sharing all of its blocks."""
        state = parent.state
        state.is_forked = True
        for index in sorted(state.unfinished - {parent.index}):
            child = Sequence(state, index, list(parent.token_ids), parent.num_prompt_tokens)
            child.num_computed_tokens = parent.num_computed_tokens
            child.num_charged_tokens = parent.num_charged_tokens
            child.matcher = None if parent.matcher is None else parent.matcher.copy()
            child.status = Status.RUNNING
            self._blocks.share(parent, child)
            child.adapter_slot = self._acquire_adapter(child) if parent.adapter_slot >= 0 else -1
            self._enter_running(child)
            self.waiting.arrive(state.request.tenant)
            state.sequences.append(child)
        if parent.index not in state.unfinished:
            self.finish(parent)
        return [sequence for sequence in state.sequences if sequence.status is Status.RUNNING]

    def give_up_choice(self, state: RequestState, index: int) -> None:
        """It will not be forked, and its seat is another's."""
        state.unfinished.discard(index)
        self._num_closed_steps = 0

    def try_lengthen(self, item: ScheduledSequence, num_drafted: int) -> bool:
        """Compute and sample so many rows more of a scheduled sequence, for tokens that it does not have yet.

        False, and nothing is changed, where that takes blocks that those who run may soon need.
        """
        num_rows = item.num_rows + num_drafted
        num_missing = self._blocks.num_missing(item.sequence, num_rows)
        if num_missing > 0 and self.pool.num_available < num_missing + len(self.running):
            return False
        has_blocks = self._blocks.try_extend(item.sequence, num_rows, [])
        assert has_blocks, "blocks were counted"
        item.num_rows, item.num_sampled_rows = num_rows, item.num_sampled_rows + num_drafted
        return True

    def note_accepted(self, sequence: Sequence) -> None:
        """The first of its tokens that are not computed was drafted, so that it is computed, and charged as others."""
        sequence.num_computed_tokens += 1
        self._charge_up_to(sequence, sequence.num_computed_tokens)

    def remember_blocks(self, sequence: Sequence) -> None:
        """Let others find its full, computed blocks. Only once its sampled row, which depends on all, is finite."""
        self._blocks.remember(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Free everything the sequence holds, whatever its status. It must not be finished yet."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self.waiting.leave(sequence.request.tenant)
        self._num_closed_steps = 0

    def _try_schedule_rows(self, sequences: Seq[Sequence], plan: StepPlan) -> bool:
        """One row of each, where that is all there is to compute.

        False, and nothing is changed, where that takes more than new blocks, or more rows than a step has.
        """
        if len(sequences) > self._max_num_batched_tokens:
            return False
        if any(len(each.token_ids) - each.num_computed_tokens > 1 or each.is_pooled for each in sequences):
            return False
        if not self._blocks.try_extend_all(sequences):
            return False
        for sequence in sequences:
            self._charge_up_to(sequence, sequence.num_computed_tokens + 1)
        plan.scheduled = [ScheduledSequence(sequence, 1, 1) for sequence in sequences]
        return True

    def _schedule_each(self, sequences: Seq[Sequence], plan: StepPlan) -> None:
        """As far as a step's rows go; some may be preempted for others."""
        budget = self._max_num_batched_tokens
        has_seat = sum(map(_num_seats, sequences)) < self._max_num_seqs
        in_turn = len(sequences) > budget
        for sequence in sorted(sequences, key=lambda sequence: self._turn(sequence, in_turn=in_turn)):
            if budget == 0:
                break
            if sequence.status is not Status.RUNNING:  # preempted by an earlier one of this loop
                continue
            most = budget
            is_prompt = sequence.num_uncomputed_tokens > 1
            if is_prompt and has_seat and self.waiting.has_waiting_before(sequence.request.tenant):
                most = min(budget, -(-self._max_num_batched_tokens // LONG_PROMPT_SHARE))
            budget -= self._schedule_running(sequence, most, plan)

    def _turn(self, sequence: Sequence, *, in_turn: bool) -> tuple[float, float]:
        """Decodes first, so that a long prompt never stalls them, then prompts of tenants that were served less.

        in_turn: there are not even rows for all decodes.
        """
        if sequence.num_uncomputed_tokens > 1:
            return 1, self.waiting.served(sequence.request.tenant)
        return 0, in_turn * sequence.num_output_tokens

    def _has_blocks(self, sequences: Seq[Sequence]) -> bool:
        """Whether all of them can be scheduled and nobody is preempted, even if each got as many rows as it can."""
        budget = self._max_num_batched_tokens
        num_blocks = sum(self._blocks.num_missing(each, self._num_rows(each, budget)) for each in sequences)
        return num_blocks <= self.pool.num_available

    def _schedule_running(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Rows of the budget that are used; preempted sequences give theirs back (as a negative number of rows)."""
        num_rows = self._num_rows(sequence, budget)
        num_returned = 0
        while not self._blocks.try_extend(sequence, num_rows, plan.block_copies):
            victim = self._choose_victim()
            for i, item in enumerate(plan.scheduled):
                if item.sequence is victim:
                    num_returned += item.num_rows
                    del plan.scheduled[i]
                    break
            self._preempt(victim)
            if victim is sequence:
                return -num_returned
        self._append(plan, sequence, num_rows)
        return num_rows - num_returned

    def _admit_waiting(self, staying: Seq[Sequence], plan: StepPlan) -> None:
        """staying: of those who run, who keep their seats."""
        if len(self.waiting) == 0:
            return
        if staying and len(staying) == len(self.running) and self._is_closed():
            self._num_closed_steps -= 1
            return
        budget = self._max_num_batched_tokens - sum(item.num_rows for item in plan.scheduled)
        num_seats = self._max_num_seqs - sum(_num_seats(sequence) for sequence in staying)
        bypassed: list[Sequence] = []
        is_alone = not self.running
        if self._adapters is not None:
            self._adapters.settle_uploads()
        self._num_closed_steps = MAX_CLOSED_STEPS
        if num_seats <= 0:
            return
        for sequence in self.waiting:
            if num_seats < _num_seats(sequence):
                break
            if budget == 0:
                self._num_closed_steps = 0
                break
            admission = self._try_admit(sequence, budget, plan, is_alone=is_alone)
            if admission is _Admission.NO_ROOM:
                break
            if admission is _Admission.NO_ADAPTER_ROOM:
                if sequence.state.num_bypassed >= MAX_BYPASSED:
                    break
                bypassed.append(sequence)
            elif admission is _Admission.ADMITTED:
                num_seats -= _num_seats(sequence)
                budget -= plan.scheduled[-1].num_rows
                for earlier in bypassed:
                    earlier.state.num_bypassed += 1

    def _is_closed(self) -> bool:
        """Whether nobody who waits could be admitted now, as far as that can be told without trying."""
        return self._num_closed_steps > 0 and (self._adapters is None or not self._adapters.has_news())

    def _try_admit(self, sequence: Sequence, budget: int, plan: StepPlan, *, is_alone: bool) -> _Admission:
        """is_alone: nobody's next token would wait, beside it in a step, for an adapter that is still being copied."""
        if not self._can_acquire_adapter(sequence):
            return _Admission.NO_ADAPTER_ROOM  # before its prompt is hashed
        needs_every_row = _needs_prompt_logprobs(sequence) or sequence.state.wants_mean
        cached = [] if needs_every_row else self._blocks.find_prefix(sequence)
        num_cached = len(cached) * self._block_size
        num_blocks = -(-sequence.num_tokens // self._block_size) - len(cached)
        if num_blocks + self.pool.num_evictable(cached) > self.pool.num_available:
            return _Admission.NO_ROOM
        try:
            num_rows = min(sequence.num_tokens - num_cached, budget)
            adapter_slot = self._try_acquire_adapter(sequence, None if is_alone else num_rows * HIDDEN_COPY_BYTES)
        except AdapterError as error:
            plan.failed.append((sequence, error.message))
            self.finish(sequence)
            return _Admission.FAILED
        if adapter_slot is None:
            return _Admission.NO_ADAPTER_ROOM
        self.pool.acquire(cached)
        sequence.blocks = cached
        sequence.adapter_slot = adapter_slot
        sequence.num_computed_tokens = num_cached
        sequence.num_remembered_blocks = len(cached)
        sequence.num_charged_tokens = max(sequence.num_charged_tokens, num_cached)
        self._begin(sequence.state, num_cached, plan)
        self.waiting.remove(sequence)
        sequence.status = Status.RUNNING
        self._enter_running(sequence)
        num_rows = self._num_rows(sequence, budget)
        has_blocks = self._blocks.try_extend(sequence, num_rows, plan.block_copies)
        assert has_blocks, "blocks were counted before admission"
        self._append(plan, sequence, num_rows)
        return _Admission.ADMITTED

    def _append(self, plan: StepPlan, sequence: Sequence, num_rows: int) -> None:
        num_sampled_rows, num_pooled_rows = _num_sampled_rows(sequence, num_rows), 0
        if sequence.is_pooled:
            num_sampled_rows, num_pooled_rows = 0, num_rows if sequence.state.wants_mean else num_sampled_rows
        num_base_rows = min(max(sequence.state.adapter_start - sequence.num_computed_tokens, 0), num_rows)
        plan.scheduled.append(ScheduledSequence(sequence, num_rows, num_sampled_rows, num_pooled_rows, num_base_rows))
        self._charge_up_to(sequence, sequence.num_computed_tokens + num_rows)

    def _charge_up_to(self, sequence: Sequence, end: int) -> None:
        if end > sequence.num_charged_tokens:
            self._charge(sequence.request, end - sequence.num_charged_tokens)
            sequence.num_charged_tokens = end

    def _charge(self, request: EngineRequest, num_tokens: int) -> None:
        """A tenant of twice the weight is served twice as much before others come first."""
        self.waiting.charge(request.tenant, num_tokens / request.tenant_weight)

    def _begin(self, state: RequestState, num_cached: int, plan: StepPlan) -> None:
        if state.is_begun:
            return
        state.is_begun = True
        self.prefix_cache_queries += len(state.request.prompt_token_ids)
        self.prefix_cache_hits += num_cached
        queue_s = time.monotonic() - state.arrival_s
        plan.begun.append(BegunPrompt(state.request.request_id, queue_s, num_cached))

    def _num_rows(self, sequence: Sequence, budget: int) -> int:
        """Of its tokens that are not computed, or, ahead, of the one that it is about to get."""
        num_rows = min(max(sequence.num_uncomputed_tokens, 1), budget)
        return min(num_rows, MAX_PROMPT_LOGPROB_ROWS) if _needs_prompt_logprobs(sequence) else num_rows

    def _choose_victim(self) -> Sequence:
        """The newest sequence of the most-served tenant."""
        return max(self.running, key=lambda s: (self.waiting.served(s.request.tenant), s.admitted))

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of its tenant's queue, holding nothing; its tokens are recomputed when it returns."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed_tokens = 0
        if _needs_prompt_logprobs(sequence):
            sequence.state.prompt_logprobs = None
        sequence.state.hidden_sum = None
        self.waiting.put_back(sequence)
        self.num_preemptions += 1

    def _enter_running(self, sequence: Sequence) -> None:
        self._num_admitted += 1
        sequence.admitted = self._num_admitted
        self.running.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._blocks.release(sequence)
        if sequence.adapter_slot >= 0:
            assert self._adapters is not None
            assert sequence.request.adapter_digest is not None
            self._adapters.release(sequence.request.adapter_digest)
            sequence.adapter_slot = -1

    def _can_acquire_adapter(self, sequence: Sequence) -> bool:
        """Whether its adapter is there or fits beside the running ones. Asked of all who wait, so it takes little."""
        digest = sequence.request.adapter_digest
        if digest is None:
            return True
        assert self._adapters is not None
        if self._max_loras is not None and self._adapters.num_in_use >= self._max_loras:
            return self._adapters.is_in_use(digest)
        return self._adapters.can_make_room(digest)

    def _try_acquire_adapter(self, sequence: Sequence, max_arriving_bytes: int | None) -> int | None:
        """-1 for the base model; None when the adapter is not there yet. Raises `AdapterError`.

        max_arriving_bytes: None too while a larger one is copied, see `AdapterMemory.try_acquire`.
        """
        digest = sequence.request.adapter_digest
        if digest is None:
            return -1
        assert self._adapters is not None
        was_resident = self._adapters.is_resident(digest)
        adapter_slot = self._adapters.try_acquire(digest, max_arriving_bytes)
        if adapter_slot is not None and not was_resident:
            self._charge(sequence.request, COLD_LOAD_TOKENS)
        return adapter_slot

    def _acquire_adapter(self, sequence: Sequence) -> int:
        assert self._adapters is not None
        assert sequence.request.adapter_digest is not None
        adapter_slot = self._adapters.try_acquire(sequence.request.adapter_digest)
        assert adapter_slot is not None, "the parent's adapter is resident"
        return adapter_slot

    def check_invariants(self) -> None:
        """Raises AssertionError when a block or an adapter reference was lost or made up."""
        self.pool.check_invariants([sequence.blocks for sequence in self.running])
        for sequence in self.running:
            assert len(sequence.blocks) * self._block_size >= sequence.num_computed_tokens, (
                "a computed token has no block"
            )
        if self._adapters is not None:
            references: dict[str, int] = {}
            for sequence in self.running:
                if sequence.request.adapter_digest is not None:
                    digest = sequence.request.adapter_digest
                    references[digest] = references.get(digest, 0) + 1
            self._adapters.check_invariants(references)


def _needs_prompt_logprobs(sequence: Sequence) -> bool:
    """True until the prompt has been computed once with all its logits."""
    state = sequence.state
    return state.wants_prompt_logprobs and sequence.index == 0 and not state.has_all_prompt_logprobs


def _num_sampled_rows(sequence: Sequence, num_rows: int) -> int:
    if _needs_prompt_logprobs(sequence):
        return num_rows
    return int(num_rows >= sequence.num_uncomputed_tokens)


def _num_seats(sequence: Sequence) -> int:
    """Running sequences to count for this one: all choices until they are forked."""
    return 1 if sequence.state.is_forked else len(sequence.state.unfinished)


def running_digests(sequences: Seq[Sequence]) -> list[str]:
    return sorted({s.request.adapter_digest for s in sequences if s.request.adapter_digest is not None})

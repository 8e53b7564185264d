"""Decides what each step computes.

There are no prefill and decode phases: under one token budget, a step computes whatever tokens its sequences have that
are not computed yet. This covers chunked prompts, prefix hits and recompute after preemption.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from enum import Enum
from itertools import chain

from loraserve_adapters.errors import AdapterError

from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.kv.blocks import BlockPool
from loraserve.engine.request import BegunPrompt, EngineRequest
from loraserve.engine.scheduling.fair_queue import FairQueue
from loraserve.engine.scheduling.giving_way import Way, WayFinder, dispensability
from loraserve.engine.scheduling.plan import ScheduledSequence, StepPlan
from loraserve.engine.scheduling.sequence import RequestState, Sequence, Status
from loraserve.engine.scheduling.sequence_adapters import SequenceAdapters
from loraserve.engine.scheduling.sequence_blocks import SequenceBlocks
from loraserve.engine.scheduling.sequence_states import SequenceStates

MAX_BYPASSED = 64
"""Admissions that may overtake a request whose adapter does not fit; after that, no request is admitted before it."""
COLD_LOAD_TOKENS = 32
"""Tokens that loading a cold adapter adds to its tenant's counter."""
HIDDEN_COPY_BYTES = 1 << 20
"""Adapter bytes that are copied to a GPU while it computes one row of a prompt. Estimated: the copy takes 21 µs at 50
GB/s, a row of an 8B model takes 27 µs at 600 TFLOP/s, and a smaller model has smaller adapters. NOTE: a step that is a
graph begins only after the copy. There, this bounds the time that others wait for the copy, which takes the place of
the host's launches."""
MAX_PROMPT_LOGPROB_ROWS = 256
"""Most rows of a sequence in one step whose logits are kept for prompt logprobs: each takes a vocabulary-sized row."""
LONG_PROMPT_SHARE = 2
"""A running prompt gets at most a step's rows divided by this while another tenant is waiting that was not served more:
otherwise, that tenant's short prompts would wait for the whole of a long one."""
MAX_CLOSED_STEPS = 16
"""After a failed admission, retry after at most this many steps even if no sequence finished: the fair queue's order
may have changed."""


class _Admission(Enum):
    ADMITTED = "admitted"
    NO_ROOM = "no room"
    NO_ADAPTER_ROOM = "no adapter room"
    ADAPTER_ARRIVING = "adapter arriving"
    """It has its place in the arena, which nobody who is admitted meanwhile can take."""
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
        states: SequenceStates | None = None,
    ) -> None:
        """states: None for a model without recurrent states."""
        self.pool = pool
        self.running: list[Sequence] = []
        """In order of admission."""
        self.waiting = FairQueue()
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._states = states or SequenceStates(None, block_size, saves=False)
        self._blocks = SequenceBlocks(pool, block_size, self._states)
        self._adapters = SequenceAdapters(adapters, max_loras)
        self._block_size = block_size
        self._ways = WayFinder(
            self.waiting, self._blocks, pool, self._adapters, max_num_seqs=max_num_seqs, max_bypassed=MAX_BYPASSED
        )
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_admitted = 0
        self._num_closed_steps = 0
        """Number of steps that need not try to admit a sequence, unless a sequence or an adapter arrives or leaves."""

    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, state: RequestState) -> None:
        """Queue the request's first choice; the others are forked from it once the prompt is computed."""
        sequence = state.sequences[0]
        self.waiting.arrive(state.request.tenant)
        self.waiting.append(sequence)
        self._num_closed_steps = 0

    def schedule(self) -> StepPlan:
        """NOTE: not to be called while a queued step's tokens are unknown: it may preempt a sequence of that step."""
        plan = StepPlan()
        is_open = self._is_open(self.running)
        num_preempted_before = self.num_preemptions
        if not self._try_schedule_rows(self.running, plan):
            self._schedule_each(self.running, plan)
        if self.num_preemptions != num_preempted_before:
            self._num_closed_steps = 0
        elif is_open:
            urgent = self._make_way(plan)
            self._admit_waiting(self.running, plan, urgent)
            if urgent is not None or self._ways.may_open:
                self._num_closed_steps = 0  # others may be urgent, too
        plan.scheduled.sort(key=lambda item: item.sequence.adapter_slot)
        plan.state_copies = self._states.take_copies()
        return plan

    def try_schedule_ahead(self, ends: Callable[[Sequence], bool]) -> StepPlan | None:
        """Plan the step after a queued one whose tokens are unknown, as if none of those tokens ended a sequence.

        ends: whether a sequence's next token is its last one, whichever token it is. A sequence with no known token
        left to compute gets a row for the token that it is about to get.

        Returns None and changes nothing if a sequence might have to be preempted.
        """
        going_on = [each for each in self.running if each.num_uncomputed_tokens > 0 or not ends(each)]
        is_open = self._is_open(going_on)
        plan = StepPlan()
        if is_open and self._find_way(plan) is not None:
            self._num_closed_steps = 0
            return None
        if not self._try_schedule_rows(going_on, plan):
            if not self._has_blocks(going_on):
                if is_open:
                    self._num_closed_steps = 0
                return plan if plan.failed else None
            self._schedule_each(going_on, plan)
        if is_open:
            self._admit_waiting(going_on, plan)
            if self._ways.may_open:
                self._num_closed_steps = 0
        plan.scheduled.sort(key=lambda item: item.sequence.adapter_slot)
        return plan

    def fork(self, parent: Sequence) -> list[Sequence]:
        """Fork the unfinished choices from the parent, sharing all of its blocks. Returns the request's running
        choices."""
        state = parent.state
        state.is_forked = True
        others = sorted(state.unfinished - {parent.index})
        heir = None if parent.index in state.unfinished else others[-1]
        for index in others:
            child = Sequence(state, index, list(parent.token_ids), parent.num_prompt_tokens)
            child.num_computed_tokens = parent.num_computed_tokens
            child.num_charged_tokens = parent.num_charged_tokens
            child.matcher = None if parent.matcher is None else parent.matcher.copy()
            child.status = Status.RUNNING
            self._blocks.share(parent, child)
            if index == heir:
                self._states.hand_over(parent, child)
            else:
                self._states.share(parent, child)
            self._adapters.share(parent, child)
            self._enter_running(child)
            self.waiting.arrive(state.request.tenant)
            state.sequences.append(child)
        if parent.index not in state.unfinished:
            self.finish(parent)
        return [sequence for sequence in state.sequences if sequence.status is Status.RUNNING]

    def abandon_choice(self, state: RequestState, index: int) -> None:
        """This choice will not be forked; its seat becomes free."""
        state.unfinished.discard(index)
        self._num_closed_steps = 0

    def try_lengthen(self, item: ScheduledSequence, num_drafted: int) -> bool:
        """Compute and sample `num_drafted` more rows of a scheduled sequence, for tokens that it does not have yet.

        Returns False and changes nothing if that takes blocks that running sequences may soon need.
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
        """Its first uncomputed token was drafted, so count it as computed and charge for it as for any other."""
        sequence.num_computed_tokens += 1
        self._charge_up_to(sequence, sequence.num_computed_tokens)

    def remember_blocks(self, sequence: Sequence) -> None:
        """Make its full, computed blocks findable. Only once its sampled row, which depends on all of them, is known to
        be finite."""
        self._blocks.remember(sequence)
        self._states.remember(sequence)

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
        """Schedule one row of each sequence, if that is all they have to compute.

        Otherwise returns False and changes nothing; also if this takes more than new blocks, or more rows than a step
        has.
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
        if self._states.saves:
            for item in plan.scheduled:
                self._states.plan_save(item)
        return True

    def _schedule_each(self, sequences: Seq[Sequence], plan: StepPlan) -> None:
        """Schedule rows of each until the step is full; may preempt some sequences for others."""
        budget = self._max_num_batched_tokens
        has_seat = sum(each.num_seats for each in sequences) < self._max_num_seqs
        in_turn = len(sequences) > budget
        for sequence in sorted(sequences, key=lambda sequence: self._turn(sequence, in_turn=in_turn)):
            if budget == 0:
                break
            if sequence.status is not Status.RUNNING:  # preempted earlier in this loop
                continue
            most = budget
            is_prompt = sequence.num_uncomputed_tokens > 1
            if is_prompt and has_seat and self.waiting.has_waiting_before(sequence.request):
                most = min(budget, -(-self._max_num_batched_tokens // LONG_PROMPT_SHARE))
            budget -= self._schedule_running(sequence, most, plan)

    def _turn(self, sequence: Sequence, *, in_turn: bool) -> tuple[float, float, int]:
        """Sort key: decodes first, so that a long prompt never stalls them, then prompts, least-served tenants first,
        and among those of one tenant the most urgent.

        in_turn: there are too few rows even for all decodes, so those with the fewest output tokens go first.
        """
        if sequence.num_uncomputed_tokens > 1:
            return 1, self.waiting.served(sequence.request.tenant), sequence.request.priority
        return 0, in_turn * sequence.num_output_tokens, 0

    def _has_blocks(self, sequences: Seq[Sequence]) -> bool:
        """Whether all of them can be scheduled without preemption, even if each gets as many rows as it can use."""
        budget = self._max_num_batched_tokens
        num_blocks = sum(self._blocks.num_missing(each, self._num_rows(each, budget)) for each in sequences)
        return num_blocks <= self.pool.num_available

    def _schedule_running(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Returns the rows taken from the budget, minus those of sequences preempted for it; can be negative."""
        num_rows = self._num_rows(sequence, budget)
        num_returned = 0
        while not self._blocks.try_extend(sequence, num_rows, plan.block_copies):
            victim = self._choose_victim()
            num_returned += _take_out(victim, plan)
            self._preempt(victim)
            if victim is sequence:
                return -num_returned
        self._append(plan, sequence, num_rows)
        return num_rows - num_returned

    def _is_open(self, staying: Seq[Sequence]) -> bool:
        """Whether to try to admit a sequence in this step. To be asked once.

        staying: the running sequences that keep their seats.
        """
        if len(self.waiting) == 0:
            return False
        if self._num_closed_steps > 0 and not self._adapters.has_news() and len(staying) == len(self.running) > 0:
            self._num_closed_steps -= 1
            return False
        self._adapters.settle_uploads()
        return True

    def _admit_waiting(self, staying: Seq[Sequence], plan: StepPlan, urgent: Sequence | None = None) -> None:
        """staying: as in `_is_open`. urgent: to be tried first, because others gave way to it."""
        budget = self._max_num_batched_tokens - sum(item.num_rows for item in plan.scheduled)
        num_seats = self._max_num_seqs - sum(each.num_seats for each in staying)
        bypassed: list[Sequence] = []
        is_alone = not self.running
        self._num_closed_steps = MAX_CLOSED_STEPS
        if num_seats <= 0:
            return
        for sequence in chain([] if urgent is None else [urgent], self.waiting):
            if num_seats < sequence.num_seats:
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
                num_seats -= sequence.num_seats
                budget -= plan.scheduled[-1].num_rows
                for earlier in bypassed:
                    earlier.state.num_bypassed += 1

    def _try_admit(self, sequence: Sequence, budget: int, plan: StepPlan, *, is_alone: bool) -> _Admission:
        """is_alone: no sequence is running whose next token would wait, in the same step, for an adapter still being
        copied."""
        if not self._adapters.can_acquire(sequence):
            return _Admission.NO_ADAPTER_ROOM  # before its prompt is hashed
        if self._adapters.is_loading(sequence):
            return _Admission.ADAPTER_ARRIVING  # likewise
        cached = self._blocks.find_prefix(sequence)
        num_cached = len(cached) * self._block_size
        if self._blocks.num_to_admit(sequence, cached) > self.pool.num_available:
            return _Admission.NO_ROOM
        num_rows = min(sequence.num_tokens - num_cached, budget)
        is_cold = self._adapters.is_cold(sequence)
        try:
            has_adapter = self._adapters.try_acquire(sequence, None if is_alone else num_rows * HIDDEN_COPY_BYTES)
        except AdapterError as error:
            self._fail(sequence, error.message, plan)
            return _Admission.FAILED
        if not has_adapter:
            is_arriving = self._adapters.is_arriving(sequence)
            return _Admission.ADAPTER_ARRIVING if is_arriving else _Admission.NO_ADAPTER_ROOM
        if is_cold:
            self._charge(sequence.request, COLD_LOAD_TOKENS)
        self.pool.acquire(cached)
        sequence.blocks = cached
        self._states.enter(sequence, len(cached))
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
        item = ScheduledSequence(sequence, num_rows, num_sampled_rows, num_pooled_rows, num_base_rows)
        self._states.plan_save(item)
        plan.scheduled.append(item)
        self._charge_up_to(sequence, sequence.num_computed_tokens + num_rows)

    def _charge_up_to(self, sequence: Sequence, end: int) -> None:
        if end > sequence.num_charged_tokens:
            self._charge(sequence.request, end - sequence.num_charged_tokens)
            sequence.num_charged_tokens = end

    def _charge(self, request: EngineRequest, num_tokens: int) -> None:
        """A tenant with twice the weight is served twice as much before others go first."""
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
        """Rows for its uncomputed tokens or, when scheduling ahead, for the token that it is about to get."""
        num_rows = self._states.limit_rows(sequence, min(max(sequence.num_uncomputed_tokens, 1), budget))
        return min(num_rows, MAX_PROMPT_LOGPROB_ROWS) if sequence.needs_prompt_logprobs else num_rows

    def _choose_victim(self) -> Sequence:
        """Of the most-served tenant, the newest sequence of the least urgent ones."""
        return max(self.running, key=lambda s: (self.waiting.served(s.request.tenant), *dispensability(s)))

    def _find_way(self, plan: StepPlan) -> Way | None:
        way = self._ways.find(self.running)
        if way is None:
            return None
        if way.error is not None:
            self._fail(way.urgent, way.error, plan)
            return None
        if way.is_first_use:
            self._charge(way.urgent.request, COLD_LOAD_TOKENS)
        return way

    def _make_way(self, plan: StepPlan) -> Sequence | None:
        """Preempt sequences for a more urgent one of their tenant, which is returned and has room then.

        Their tokens are charged again as far as they are recomputed: giving way is at the tenant's own expense.
        """
        way = self._find_way(plan)
        if way is None:
            return None
        for victim in way.victims:
            _take_out(victim, plan)
            self._preempt(victim)
            victim.num_charged_tokens = 0
        for each in way.overtaken:
            each.state.num_bypassed += 1
        return way.urgent

    def _fail(self, sequence: Sequence, error: str, plan: StepPlan) -> None:
        plan.failed.append((sequence, error))
        self.finish(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Return it to the head of its tenant's queue and free everything it holds; its tokens are recomputed later."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed_tokens = 0
        if sequence.needs_prompt_logprobs:
            sequence.state.prompt_logprobs = None
        sequence.state.hidden_sum = None
        self.waiting.put_back(sequence)
        self.num_preemptions += 1

    def _enter_running(self, sequence: Sequence) -> None:
        self._num_admitted += 1
        sequence.admitted = self._num_admitted
        sequence.num_admitted_tokens = sequence.num_tokens
        self.running.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._blocks.release(sequence)
        self._states.release(sequence)
        self._adapters.release(sequence)

    def check_invariants(self) -> None:
        """Raises AssertionError if a block or adapter reference was lost or has no owner."""
        self.pool.check_invariants([sequence.blocks for sequence in self.running])
        for sequence in self.running:
            assert len(sequence.blocks) * self._block_size >= sequence.num_computed_tokens, (
                "a computed token has no block"
            )
        self._states.check_invariants(self.running)
        self._adapters.check_invariants(self.running)


def _take_out(sequence: Sequence, plan: StepPlan) -> int:
    """Returns the number of rows that were scheduled for it."""
    for i, item in enumerate(plan.scheduled):
        if item.sequence is sequence:
            del plan.scheduled[i]
            return item.num_rows
    return 0


def _num_sampled_rows(sequence: Sequence, num_rows: int) -> int:
    if sequence.needs_prompt_logprobs:
        return num_rows
    return int(num_rows >= sequence.num_uncomputed_tokens)

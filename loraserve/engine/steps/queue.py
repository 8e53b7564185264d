"""From a plan to a queued step: its batch, the forward pass, the choice of its tokens."""

from collections.abc import Sequence as Seq

import numpy as np
from loraserve_kernels.step_batch import StepBatch
from numpy.typing import NDArray
from torch import Tensor

from loraserve.engine.adapters.arrival import StepArrivals
from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.device.accelerator import upload_ids
from loraserve.engine.sampling.device_sampler import QueuedTokens
from loraserve.engine.sampling.logit_masks import mask_logits
from loraserve.engine.sampling.row import SamplingRow, rows_after
from loraserve.engine.sampling.sampler import Sampled, Sampler
from loraserve.engine.scheduling.plan import ScheduledSequence, StepPlan
from loraserve.engine.scheduling.scheduler import Scheduler
from loraserve.engine.scheduling.sequence import Sequence
from loraserve.engine.steps.batch_builder import BatchBuilder
from loraserve.engine.steps.gpu_batch_builder import GpuBatchBuilder
from loraserve.engine.steps.in_flight import StepInFlight
from loraserve.engine.steps.model_runner import ModelRunner
from loraserve.engine.steps.pooling import pool

_NO_COPIES = "a sequence with a row in the last step shares its last block"


class StepQueue:
    """Queues a step while the one before it runs, if tokens are chosen on a device.

    Tokens that are its input then never leave the device. If a sequence turns out to have ended, one row was computed
    for nothing. A step with the last step's sequences, one row each, reuses that step's batch, on the host as well as
    on a device.
    """

    # NOTE: the extra row of an ended sequence reads and writes blocks, and reads an adapter, that may be free by then.
    # A block's next rows are queued later, and so run later; no kernel reads a block where nothing was written. The
    # copy of another adapter waits for an event that was recorded, after the row, when the last reference was released.
    # And no findable block was written by the row: a block becomes findable once the tokens that fill it were
    # collected, and the row is for the token after them.

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        adapters: AdapterMemory | None,
        builder: BatchBuilder,
        runner: ModelRunner,
        sampler: Sampler,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._scheduler = scheduler
        self._adapters = adapters
        self._builder = builder
        self._ahead = builder if isinstance(builder, GpuBatchBuilder) else None
        """The builder, if it can build a batch while the step before is choosing its tokens."""
        self._runner = runner
        self._sampler = sampler
        self._eos = eos_token_ids
        self._last: StepInFlight | None = None
        """The last step, if steps are not queued ahead and no grammar needs its tokens."""
        self.num_prompt_tokens = 0
        """Prompt tokens computed."""

    def queue(self, plan: StepPlan, before: StepInFlight | None = None) -> StepInFlight:
        """Queue a non-empty plan and count its rows as computed. Waits for the step unless a device chooses its tokens.

        before: the last step queued, if it is not collected yet; its tokens must be chosen on a device. Neither step is
        waited for, unless log-probabilities of prompts or vectors are requested.
        """
        if before is not None and _continues(before, plan):
            return self._queue_again_ahead(plan, before)
        if self._last is not None and _continues(self._last, plan):
            step = self._queue_again(plan, self._last)
        else:
            step = self._queue(plan, before)
        is_known = self._ahead is None and not step.is_awaited
        self._last = step if is_known else None
        return step

    def forget(self) -> None:
        """To be called when no sequence runs: drops the last step's sequences and all that they hold."""
        self._last = None

    def _queue(self, plan: StepPlan, before: StepInFlight | None) -> StepInFlight:
        """`queue` for any plan."""
        if plan.block_copies:
            self._runner.copy_blocks(plan.block_copies)
        if plan.state_copies:
            self._runner.copy_states(plan.state_copies)
        arrivals = self._arrivals(plan)
        known_rows = self._rows_known_before(plan.scheduled)
        batch = self._build(plan.scheduled, before, [row for _, row in known_rows])
        batch.draws = self._sampler.draws_of(known_rows)
        output = self._runner.forward(batch, arrivals)
        logits, best = output.logits, output.best
        pooled = [] if output.hidden is None else pool(plan.scheduled, output.hidden, self._adapters)
        sequences: list[Sequence] = []
        items: list[ScheduledSequence] = []
        rows: list[int] = []
        masks: list[tuple[int, NDArray[np.uint8]]] = []
        end_row = 0
        for item in plan.scheduled:
            start_row, end_row = end_row, end_row + item.num_sampled_rows
            for sequence in self._account(item, logits, start_row):
                if sequence.matcher is not None:
                    of_rows = enumerate([sequence.matcher.mask(), *item.draft_masks], start=len(rows))
                    masks += [(row, mask) for row, mask in of_rows if mask is not None]
                sequences.append(sequence)
                items.append(item)
                if item.draft:
                    rows += range(end_row - 1 - len(item.draft), end_row - 1)
                rows.append(end_row - 1)
        if not sequences:
            return StepInFlight(plan.scheduled, [], [], Sampled([], [], []), pooled)
        if rows != list(range(end_row)):
            logits, best = logits.index_select(0, upload_ids(rows, logits.device)), None
        sampling_rows = [row for _, row in known_rows]
        if not sampling_rows:
            sampling_rows = [each.row_to_sample(each.num_computed_tokens, self._eos) for each in sequences]
        if masks:
            mask_logits(logits, masks, self._sampler.vocab_size)
            best = None
        queued = self._sampler.try_queue(logits, sampling_rows, self._builder.sampling)
        drawn = output.drawn if batch.draws else None
        sampled = queued or self._sampler.sample(logits, sampling_rows, best, drawn)
        is_single = best is not None and len(rows) == len(sequences) and not pooled
        takes_best = is_single and all(row.takes_best for row in sampling_rows)
        return StepInFlight(plan.scheduled, sequences, items, sampled, pooled, takes_best)

    def _queue_again(self, plan: StepPlan, last: StepInFlight) -> StepInFlight:
        """`queue` for a plan that `_continues` from a step whose tokens are known."""
        # NOTE: a model's weights evict all code and objects from the caches, so what runs between two steps takes about
        # three times as long as it otherwise would. Code that the step has not run yet is expensive, above all numpy's.
        assert not plan.block_copies, _NO_COPIES
        assert not plan.state_copies, "a sequence with a row in the last step has just got its state"
        sequences = last.sequences
        rows = [] if last.takes_best else self._rows_after(sequences)
        batch = self._builder.build_again(plan.scheduled)
        batch.draws = self._sampler.draws_of(enumerate(rows))
        output = self._runner.forward(batch, self._arrivals(plan))
        best = output.best if last.takes_best else None
        if best is not None:
            sampled = Sampled.from_best(best)
        else:
            rows = rows or self._rows_after(sequences)
            sampled = self._sampler.sample(output.logits, rows, output.best, output.drawn if batch.draws else None)
        for sequence in sequences:
            sequence.num_computed_tokens += 1
        return StepInFlight(plan.scheduled, sequences, plan.scheduled, sampled, [], last.takes_best)

    def _rows_after(self, sequences: Seq[Sequence]) -> list[SamplingRow]:
        """The rows to sample once one more row of each sequence is computed."""
        return [each.row_to_sample(each.num_computed_tokens + 1, self._eos) for each in sequences]

    def _queue_again_ahead(self, plan: StepPlan, before: StepInFlight) -> StepInFlight:
        """`queue` for a plan that `_continues` from a step that is still choosing its tokens."""
        assert self._ahead is not None
        assert isinstance(before.sampled, QueuedTokens)
        assert not plan.block_copies, _NO_COPIES
        sequences = before.sequences
        rows = self._rows_after(sequences)
        batch = self._ahead.build_again_ahead(plan.scheduled, before.sampled, rows)
        output = self._runner.forward(batch, self._arrivals(plan))
        for sequence in sequences:
            sequence.num_computed_tokens += 1
        queued = self._sampler.try_queue(output.logits, rows, self._ahead.sampling)
        assert queued is not None
        return StepInFlight(plan.scheduled, sequences, plan.scheduled, queued, [])

    def _arrivals(self, plan: StepPlan) -> StepArrivals | None:
        if self._adapters is None:
            return None
        users = (item.sequence for item in plan.scheduled if item.num_base_rows < item.num_rows)
        return self._adapters.arrivals(sequence.adapter_slot for sequence in users)

    def _build(
        self, scheduled: Seq[ScheduledSequence], before: StepInFlight | None, sampled: Seq[SamplingRow]
    ) -> StepBatch:
        """sampled: the rows to sample, as far as known; a device gets them with the batch."""
        if before is None:
            return self._builder.build(scheduled, sampled)
        assert self._ahead is not None, "tokens were chosen on a device, but batches are built for the host"
        assert isinstance(before.sampled, QueuedTokens)
        row_of = {sequence: row for row, sequence in enumerate(before.sequences)}
        sequences = [item.sequence for item in scheduled]
        chosen_rows = [None if each.num_uncomputed_tokens > 0 else row_of[each] for each in sequences]
        return self._ahead.build_ahead(scheduled, before.sampled, chosen_rows, sampled)

    def _rows_known_before(self, scheduled: Seq[ScheduledSequence]) -> list[tuple[int, SamplingRow]]:
        """The rows to sample, each with its row of the logits. Empty if the step's sequences are not known before it: a
        prompt is about to fork."""
        known: list[tuple[int, SamplingRow]] = []
        end_row = 0
        for item in scheduled:
            end_row += item.num_sampled_rows
            sequence = item.sequence
            if item.num_rows < sequence.num_uncomputed_tokens or sequence.is_pooled:
                continue
            if not sequence.state.is_forked and sequence.request.sampling.n > 1:
                return []
            row = sequence.row_to_sample(sequence.num_computed_tokens + item.num_rows - len(item.draft), self._eos)
            known.append((end_row - 1 - len(item.draft), row))
            if item.draft:
                known += enumerate(rows_after(row, item.draft), end_row - len(item.draft))
        return known

    def _account(self, item: ScheduledSequence, logits: Tensor, start_row: int) -> list[Sequence]:
        """Record what was computed; returns the sequences to sample from the item's last row."""
        sequence, state = item.sequence, item.sequence.state
        if sequence.num_output_tokens == 0 and sequence.num_uncomputed_tokens > 0:
            self.num_prompt_tokens += item.num_rows
        if state.wants_prompt_logprobs and item.num_sampled_rows > 0 and sequence.index == 0:
            self._add_prompt_logprobs(sequence, logits[start_row : start_row + item.num_sampled_rows], item.num_rows)
        sequence.num_computed_tokens += item.num_rows - len(item.draft)
        if sequence.num_uncomputed_tokens > 0 or sequence.is_pooled:
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


def _continues(before: StepInFlight, plan: StepPlan) -> bool:
    """Whether the plan has `before`'s sequences in the same order, with one row each in both: for the token that
    `before` chooses.

    NOTE: their blocks and adapter slots are then the same, except for added blocks. A plan that preempts a sequence
    does not contain it but contains others, so a later plan with it has more sequences than that plan.
    """
    if not len(plan.scheduled) == len(before.scheduled) == len(before.sequences):
        return False
    return all(
        item.sequence is last.sequence is sequence and item.num_rows == last.num_rows == 1
        for item, last, sequence in zip(plan.scheduled, before.scheduled, before.sequences, strict=True)
    )

"""Runs one API request, which may have several prompts with several choices each, and streams their text."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

from loraserve.engine.request import (
    BegunPrompt,
    EngineRequest,
    FinishReason,
    PoolingParams,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
)
from loraserve.serving.bound_adapter import BoundAdapter
from loraserve.serving.engine_client import EngineClient, EngineDeadError
from loraserve.serving.engine_errors import engine_dead, request_failed
from loraserve.serving.errors import ServingError
from loraserve.serving.lifecycle import Lifecycle
from loraserve.serving.merge import merge
from loraserve.serving.telemetry.generation_times import (
    ChoiceTimes,
    GenerationPhases,
    GenerationTimes,
    phases_of,
    times_of,
)
from loraserve.serving.telemetry.metrics import ServingMetrics
from loraserve.serving.text.choice import ChoiceAssembler, ChoiceDelta, TextOptions, joined
from loraserve.serving.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    sampling: SamplingParams
    predicted_token_ids: list[int] = field(default_factory=list)
    """See `EngineRequest.predicted_token_ids`."""
    pooling: PoolingParams | None = None
    """Set if the answer is a vector; None = it is text."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A checked API request."""

    prompts: list[Prompt]
    adapter: BoundAdapter | None
    """None = the base model."""
    text: TextOptions
    received_s: float
    """`time.monotonic()` when the request came in."""
    cache_salt: str = ""
    tenant: str = ""
    tenant_weight: float = 1.0
    """Share of the engine relative to other tenants."""
    priority: int = 0
    """See `EngineRequest.priority`."""
    max_prompts_at_once: int | None = None
    """Maximum number in the engine at once; None = all of them."""
    on_first_token: Callable[[], None] | None = None
    """Also called for a first vector. Called once, on the event loop."""


@dataclass(slots=True)
class _ChoiceRun:
    assembler: ChoiceAssembler
    times: ChoiceTimes
    finish_reason: FinishReason | None = None
    num_predicted_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class PromptRun:
    """Progress and results of one prompt."""

    index: int
    engine_request: EngineRequest
    choices: list[_ChoiceRun]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    vector: bytes = b""
    """See `SequenceOutput.pooled`."""
    is_sent: bool = False
    """Whether it was sent to the engine."""
    is_begun: bool = False
    """The engine has begun to compute it: from then on it is charged. A prompt that was refused, or only waited, is not
    charged."""
    finished: bool = False


@dataclass(frozen=True, slots=True)
class PredictionUsage:
    """Drafted tokens of a request's predicted output."""

    num_accepted_tokens: int
    """Chosen by the model too, and part of the output."""
    num_rejected_tokens: int


@dataclass(frozen=True, slots=True)
class TokenUsage:
    num_prompt_tokens: int
    """Counts only prompts that the engine has begun."""
    num_completion_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int | None = None
    """Part of the completion; None if reasoning is not separated."""
    prediction: PredictionUsage | None = None
    """Set if the request predicts its output."""


@dataclass(slots=True)
class GenerationService:
    """Starts admitted jobs. One per app."""

    engine: EngineClient
    tokenizer: TextTokenizer
    metrics: ServingMetrics
    lifecycle: Lifecycle

    def start(self, job: GenerationJob) -> "Generation":
        """Accept the job; the first iteration of `Generation.steps` sends it to the engine.

        The caller must ensure that `Generation.close` is called. Raises `ServingError`.
        """
        if self.engine.error is not None:
            raise engine_dead()
        return Generation(self, job)


class Generation:
    """One job in progress. `close` may be called at any time, from anywhere, more than once; it never waits."""

    def __init__(self, service: GenerationService, job: GenerationJob) -> None:
        self._service = service
        self._job = job
        self._label = service.metrics.adapter_label(job.adapter.label if job.adapter else None)
        self._closed = False
        self._has_begun = False
        self._sent_s = job.received_s
        self._ended_by: ServingError | None = None
        self._unfinished_reason = FinishReason.ABORT
        self.prompts = [self._prompt_run(index, prompt) for index, prompt in enumerate(job.prompts)]
        self._prompt_of = {prompt.engine_request.request_id: prompt for prompt in self.prompts}
        self._num_sequences = sum(len(prompt.choices) for prompt in self.prompts)
        self._num_unfinished = len(self.prompts)
        self.finished = False
        """Whether every choice ended by itself."""
        service.lifecycle.enter(self._num_sequences)

    async def steps(self) -> AsyncGenerator[list[ChoiceDelta]]:
        """Yields new output as it arrives: at most one delta per choice, in order. Raises `ServingError`."""
        self._raise_if_ended()
        self._sent_s = time.monotonic()
        try:
            async with contextlib.aclosing(self._outputs()) as outputs:
                async for arrived in outputs:
                    self._raise_if_ended()
                    deltas = self._take(arrived)
                    self._service.metrics.snapshot(self._service.engine.stats)
                    if deltas:
                        yield deltas if len(deltas) == 1 else _joined(deltas)
                    if self.finished:
                        return
            self._raise_if_ended()
        except EngineDeadError as error:
            self._unfinished_reason = FinishReason.ERROR
            raise engine_dead() from error
        finally:
            self.close()

    def usage(self) -> TokenUsage:
        assemblers = [choice.assembler for prompt in self.prompts for choice in prompt.choices]
        has_reasoning = self._job.text.reasoning is not None
        return TokenUsage(
            num_prompt_tokens=sum(len(each.engine_request.prompt_token_ids) for each in self.prompts if each.is_begun),
            num_completion_tokens=sum(assembler.num_tokens for assembler in assemblers),
            num_cached_tokens=sum(prompt.num_cached_tokens for prompt in self.prompts),
            num_reasoning_tokens=sum(each.num_reasoning_tokens for each in assemblers) if has_reasoning else None,
            prediction=self._prediction_usage(),
        )

    @property
    def num_sent_prompt_tokens(self) -> int:
        """Counts prompts that were sent to the engine, whether it has begun them or not."""
        return sum(len(each.engine_request.prompt_token_ids) for each in self.prompts if each.is_sent)

    def _prediction_usage(self) -> PredictionUsage | None:
        if not any(prompt.engine_request.predicted_token_ids for prompt in self.prompts):
            return None
        choices = [choice for prompt in self.prompts for choice in prompt.choices]
        # Tokens accepted after a stop string are not part of the output.
        num_accepted = sum(min(choice.num_accepted_tokens, choice.assembler.num_tokens) for choice in choices)
        return PredictionUsage(num_accepted, sum(choice.num_predicted_tokens for choice in choices) - num_accepted)

    def times(self) -> GenerationTimes:
        return times_of(self._choice_times(), self._job.received_s)

    def phases(self) -> GenerationPhases | None:
        """None before the first token."""
        return phases_of(self._choice_times(), self._sent_s)

    @property
    def finish_reason(self) -> FinishReason:
        """The first choice's finish reason; if it is not finished, the reason it would get if it were closed now."""
        return self.prompts[0].choices[0].finish_reason or self._unfinished_reason

    def end_with(self, error: ServingError) -> None:
        """Abort what still runs; the reader of `steps` gets this error."""
        self._ended_by = self._ended_by or error
        for prompt in self.prompts:
            if prompt.is_sent and not prompt.finished:
                self._service.engine.abort(prompt.engine_request.request_id)

    def _choice_times(self) -> list[ChoiceTimes]:
        return [choice.times for prompt in self.prompts for choice in prompt.choices]

    def _raise_if_ended(self) -> None:
        if self._ended_by is not None:
            raise self._ended_by.copy()

    def close(self) -> None:
        """Abort what still runs."""
        if self._closed:
            return
        self._closed = True
        for prompt in self.prompts:
            if prompt.is_sent and not prompt.finished:
                self._service.engine.abort(prompt.engine_request.request_id)
                self._count_unfinished(prompt)
        self._service.metrics.request_ended(self._label)
        self._service.lifecycle.exit(self._num_sequences)

    def _prompt_run(self, index: int, prompt: Prompt) -> PromptRun:
        job, tokenizer = self._job, self._service.tokenizer
        request = EngineRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt.token_ids,
            sampling=prompt.sampling,
            adapter_digest=job.adapter.digest if job.adapter else None,
            cache_salt=job.cache_salt,
            tenant=job.tenant,
            tenant_weight=job.tenant_weight,
            priority=job.priority,
            predicted_token_ids=prompt.predicted_token_ids,
            pooling=prompt.pooling,
        )
        choices = [
            _ChoiceRun(
                ChoiceAssembler(
                    index,
                    choice,
                    job.text,
                    tokenizer.detokenizer(prompt.token_ids, skip_special_tokens=job.text.skip_special_tokens),
                ),
                ChoiceTimes(job.received_s),
            )
            for choice in range(prompt.sampling.n)
        ]
        return PromptRun(index, request, choices)

    def _outputs(self) -> AsyncGenerator[list[SequenceOutput]]:
        if len(self.prompts) == 1:
            return self._send(self.prompts[0])
        return merge(map(self._send, self.prompts), self._job.max_prompts_at_once or len(self.prompts))

    def _send(self, prompt: PromptRun) -> AsyncGenerator[list[SequenceOutput]]:
        request, prompt.is_sent = prompt.engine_request, True
        if request.pooling is None:
            self._service.metrics.request_params(request.sampling.n, request.sampling.max_tokens)
        return self._service.engine.generate(request, partial(self._note_begun, prompt))

    def _note_begun(self, prompt: PromptRun, begun: BegunPrompt) -> None:
        if self._closed:
            return
        prompt.is_begun, prompt.num_cached_tokens = True, begun.num_cached_tokens
        for choice in prompt.choices:
            choice.times.queue_s = begun.queue_s
        self._service.metrics.prompt_begun(self._label, len(prompt.engine_request.prompt_token_ids))

    def _take(self, outputs: list[SequenceOutput]) -> list[ChoiceDelta]:
        now_s = time.monotonic()
        deltas: list[ChoiceDelta] = []
        for output in outputs:
            prompt = self._prompt_of[output.request_id]
            delta = self._take_one(prompt, output, now_s)
            if delta is None:
                continue
            deltas.append(delta)
            if delta.finish_reason is None:
                continue
            prompt.finished = all(choice.assembler.finished for choice in prompt.choices)
            self._num_unfinished -= prompt.finished
            self.finished = self._num_unfinished == 0
            if output.finish_reason is None:
                # It ended on a stop string. The engine does not know stop strings and would go on generating.
                self._service.engine.abort(output.request_id, output.index)
        return deltas

    def _take_one(self, prompt: PromptRun, output: SequenceOutput, now_s: float) -> ChoiceDelta | None:
        if output.finish_reason is FinishReason.ERROR:
            self._unfinished_reason = FinishReason.ERROR
            raise request_failed(output, self._job.adapter, prompt.engine_request.sampling.grammar)
        if output.prompt_logprobs is not None:
            prompt.prompt_logprobs = output.prompt_logprobs
        choice = prompt.choices[output.index]
        if choice.assembler.finished:
            return None
        if output.token_ids:
            if output.num_predicted_tokens:
                choice.num_predicted_tokens = output.num_predicted_tokens
                choice.num_accepted_tokens = output.num_accepted_tokens
            self._note_first_token()
            self._service.metrics.tokens(self._label, choice.times, now_s)
        elif output.pooled is not None:
            prompt.vector = output.pooled
            choice.times.first_token_s = choice.times.last_token_s = now_s
            self._note_first_token()
        delta = choice.assembler.add(output)
        if delta.finish_reason is not None:
            self._count_finished(prompt, choice, delta.finish_reason, now_s)
        return delta

    def _note_first_token(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            if self._job.on_first_token is not None:
                self._job.on_first_token()

    def _count_finished(self, prompt: PromptRun, choice: _ChoiceRun, reason: FinishReason, now_s: float) -> None:
        choice.finish_reason = reason
        num_prompt_tokens = len(prompt.engine_request.prompt_token_ids)
        self._service.metrics.choice_finished(
            self._label, choice.times, reason, num_prompt_tokens, choice.assembler.num_tokens, now_s
        )

    def _count_unfinished(self, prompt: PromptRun) -> None:
        for choice in prompt.choices:
            if not choice.assembler.finished:
                self._count_finished(prompt, choice, self._unfinished_reason, time.monotonic())


def _joined(deltas: list[ChoiceDelta]) -> list[ChoiceDelta]:
    """Joins the deltas of several steps into one per choice."""
    by_choice: dict[tuple[int, int], list[ChoiceDelta]] = {}
    for delta in deltas:
        by_choice.setdefault((delta.prompt_index, delta.index), []).append(delta)
    return [joined(of_one) for of_one in by_choice.values()]


async def collect(steps: AsyncIterator[list[ChoiceDelta]]) -> list[ChoiceDelta]:
    """All choices, complete, by prompt and index."""
    deltas = [delta async for step in steps for delta in step]
    return sorted(_joined(deltas), key=lambda delta: (delta.prompt_index, delta.index))

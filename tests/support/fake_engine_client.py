"""An `EngineClient` without an engine: its tokens are a function of the request, so any mix-up changes the text."""

import asyncio
import dataclasses
import hashlib
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from loraserve_adapters.base_layout import BaseLayout, BaseModule
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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
from loraserve.serving.engine_client import AdapterLoadError, EngineDeadError, OnBegun, ignore_begun

CORPUS = [
    "The quick brown fox jumps over the lazy dog. STOP here, said the user; hello world, hello adapters!",
    "Ein Größenvergleich: naïve café — 東京 は 大きい 🙂🚀",
    "user assistant system 0123456789 {json: true}\n\n",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HIDDEN_SIZE = 8
SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges; puts <|bos|> in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return tokenizer


def make_model(tokenizer: Tokenizer | None = None, **changes: object) -> ModelDescription:
    tokenizer = tokenizer or make_tokenizer()
    module = BaseModule("model.layers.0.self_attn.q_proj", 16, 16)
    model = ModelDescription(
        name="tiny",
        architecture="LlamaForCausalLM",
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        backend="fake",
        max_model_len=512,
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN_SIZE,
        eos_token_ids=[1],
        tokenizer_json=tokenizer.to_str(),
        chat_template=CHAT_TEMPLATE,
        special_tokens={"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
        default_sampling={},
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        num_blocks=100,
        block_size=16,
        arena_size_bytes=1 << 20,
        host_tier_bytes=0,
        num_speculative_tokens=16,
        layout=BaseLayout("f" * 64, "float32", ((module,),), ()),
    )
    return dataclasses.replace(model, **changes)


Reply = Callable[[EngineRequest, int], list[int]]


def vector_of(request: EngineRequest) -> "array[float]":
    """As long as requested; depends on adapter, prompt and pooling."""
    assert request.pooling is not None
    text = f"{request.adapter_digest}|{request.prompt_token_ids}|{request.pooling}"
    size = request.pooling.dimensions or HIDDEN_SIZE
    return array("f", [byte / 256 for byte in hashlib.sha256(text.encode()).digest()[:size]])


def hashed_reply(request: EngineRequest, index: int) -> list[int]:
    """Printable tokens that depend on adapter, prompt, seed and choice; endless for practical purposes."""
    text = f"{request.adapter_digest}|{request.prompt_token_ids}|{request.sampling.seed}|{index}"
    digest = hashlib.sha256(text.encode()).digest()
    return [40 + byte % 50 for byte in digest] * 100


@dataclass
class FakeEngine:
    """Each choice gains `tokens_per_step` tokens per step; a step takes `step_s`."""

    model: ModelDescription = field(default_factory=make_model)
    reply: Reply = hashed_reply
    step_s: float = 0.0
    tokens_per_step: int = 1
    gate: asyncio.Event | None = None
    """If set, steps wait for it."""
    stats: EngineStats = field(default_factory=EngineStats)
    last_progress_s: float = field(default_factory=time.monotonic)
    longest_step_s: float = 0.0
    error: str | None = None
    refuse_with: str | None = None
    """Requests end with this error before anything is computed."""
    rest_of_prompts: asyncio.Event | None = None
    """If set, prompts that have begun wait for it."""
    fail_with: str | None = None
    """Requests end with this error after one token."""
    fail_code: EngineErrorCode | None = None
    die_after: int | None = None
    """The engine dies after this many steps of a request."""
    num_cached_tokens: int = 0
    refuse_load: str | None = None
    requests: list[EngineRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    """Requests aborted before they were complete."""
    aborted_choices: set[tuple[str, int]] = field(default_factory=set)
    """(request id, index) of choices aborted individually."""
    completed: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)

    async def generate(
        self, request: EngineRequest, on_begun: OnBegun = ignore_begun
    ) -> AsyncGenerator[list[SequenceOutput]]:
        if self.error is not None:
            raise EngineDeadError(self.error)
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            if self.refuse_with is not None:
                yield [_failure(request, self.refuse_with, self.fail_code)]
                return
            if self.gate is not None:
                await self.gate.wait()
            if request.request_id in self.aborted:
                return
            on_begun(BegunPrompt(request.request_id, 0.001, self.num_cached_tokens))
            if self.rest_of_prompts is not None:
                await self.rest_of_prompts.wait()
            replies = [self._reply_outputs(request, index) for index in range(request.sampling.n)]
            for step in range(max(len(outputs) for outputs in replies)):
                if step >= max(len(outputs) for outputs in self._live(request, replies)):
                    break
                if self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(self.step_s)
                if request.request_id in self.aborted:
                    return
                self._check_step(request, step)
                if self.fail_with is not None and step > 0:
                    yield [_failure(request, self.fail_with, self.fail_code)]
                    return
                live = self._live(request, replies)
                if step == max(len(outputs) for outputs in live) - 1:
                    self.completed.append(request.request_id)
                yield [outputs[step] for outputs in live if step < len(outputs)]
        except (GeneratorExit, asyncio.CancelledError):
            self.abort(request.request_id)
            raise
        finally:
            self.running.discard(request.request_id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        if request_id not in self.running - {*self.completed, *self.aborted}:
            return
        if index is not None:
            self.aborted_choices.add((request_id, index))
            request = next(request for request in self.requests if request.request_id == request_id)
            if any((request_id, other) not in self.aborted_choices for other in range(request.sampling.n)):
                return
        self.aborted.append(request_id)

    def _live(self, request: EngineRequest, replies: list[list[SequenceOutput]]) -> list[list[SequenceOutput]]:
        return [
            outputs for index, outputs in enumerate(replies) if (request.request_id, index) not in self.aborted_choices
        ]

    async def load(self, digest: str, packed_path: str) -> None:
        await asyncio.sleep(0)
        if self.refuse_load is not None:
            raise AdapterLoadError(self.refuse_load)
        self.loads.append(digest)

    async def unload(self, digest: str) -> None:
        await asyncio.sleep(0)
        self.unloads.append(digest)

    def _check_step(self, request: EngineRequest, step: int) -> None:
        self.last_progress_s = time.monotonic()
        self.stats = EngineStats(
            step=self.stats.step + 1,
            num_running=len(self.running),
            num_waiting=self.stats.num_waiting,
            num_generation_tokens=self.stats.num_generation_tokens + request.sampling.n,
            recent_step_tokens=[request.sampling.n],
        )
        if self.die_after is not None and step >= self.die_after:
            self.error = "the engine ended with signal 9"
            raise EngineDeadError(self.error)

    def _reply_outputs(self, request: EngineRequest, index: int) -> list[SequenceOutput]:
        if request.pooling is not None:
            return [
                SequenceOutput(
                    request.request_id,
                    index,
                    [],
                    finish_reason=FinishReason.STOP,
                    pooled=vector_of(request).tobytes(),
                )
            ]
        token_ids, reason, stop_token_id = self._finished_reply(request, index)
        starts = range(0, len(token_ids), self.tokens_per_step)
        pieces = [token_ids[start : start + self.tokens_per_step] for start in starts]
        drafted = request.predicted_token_ids[: len(token_ids)]
        is_accepted = [drafted_id == token_id for drafted_id, token_id in zip(drafted, token_ids, strict=False)]
        return [
            SequenceOutput(
                request.request_id,
                index,
                piece,
                logprobs=self._logprobs(piece, request.sampling.logprobs),
                finish_reason=reason if number == len(pieces) - 1 else None,
                stop_token_id=stop_token_id if number == len(pieces) - 1 else None,
                prompt_logprobs=self._prompt_logprobs(request) if number == 0 and index == 0 else None,
                num_predicted_tokens=len(is_accepted[: start + len(piece)]),
                num_accepted_tokens=sum(is_accepted[: start + len(piece)]),
            )
            for number, (start, piece) in enumerate(zip(starts, pieces, strict=True))
        ]

    def _finished_reply(self, request: EngineRequest, index: int) -> tuple[list[int], FinishReason, int | None]:
        sampling = request.sampling
        token_ids: list[int] = []
        for token_id in self.reply(request, index)[: sampling.max_tokens]:
            token_ids.append(token_id)
            if len(token_ids) <= sampling.min_tokens:
                continue
            if token_id in self.model.eos_token_ids and not sampling.ignore_eos:
                return token_ids, FinishReason.STOP, None
            if token_id in sampling.stop_token_ids:
                return token_ids, FinishReason.STOP, token_id
        return token_ids, FinishReason.LENGTH, None

    def _logprobs(self, token_ids: list[int], count: int | None) -> list[TokenLogprob] | None:
        if count is None:
            return None
        return [self._logprob(token_id, count) for token_id in token_ids]

    def _logprob(self, token_id: int, count: int) -> TokenLogprob:
        top = [(token_id, -0.5), *((other, -1.0 - other) for other in range(40, 40 + count))]
        return TokenLogprob(token_id, -0.5, 1, top[:count])

    def _prompt_logprobs(self, request: EngineRequest) -> list[TokenLogprob | None] | None:
        count = request.sampling.prompt_logprobs
        if count is None:
            return None
        return [None, *(self._logprob(token_id, count) for token_id in request.prompt_token_ids[1:])]


def _failure(request: EngineRequest, error: str, code: EngineErrorCode | None) -> SequenceOutput:
    return SequenceOutput(request.request_id, 0, [], finish_reason=FinishReason.ERROR, error=error, error_code=code)

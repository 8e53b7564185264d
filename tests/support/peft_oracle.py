"""PEFT's answers in float32, one adapter at a time, and checks of an engine's answers in the dtype it computes in."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from loraserve_kernels.quantization import Quantization
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest
from loraserve.engine.scheduling.sequence_states import UNCERTAIN_TOKENS
from loraserve.models.quantized_weights import round_weights
from tests.support.engines import Answer, Answers, add_adapters, collect, greedy, make_engine, run
from tests.support.tiny_adapters import Reference, adapter_configs, forced_logits, reference_answers, save_adapters
from tests.support.tiny_models import PHI3_ORIGINAL_LENGTH, RECURRENT, save_tiny_model

NUM_TOKENS = 10
VOCAB_SIZE = 259
LOGIT_TOLERANCE = 1e-4
"""For float32, relative to the largest |logit|."""
TIMES_THE_ROUNDING_OF_PEFT = 2.0
"""For bfloat16, a multiple of PEFT's own error when it computes the same tokens in bfloat16. Over the ten
architectures, the CPU's engine was off by at most 1.04 times that, and without its adapters by at least 3.4 times."""
MARGIN = 10
"""Multiple of the tolerance. If PEFT's own two best logits are closer than this, either token is right: each may be off
by the tolerance times the largest |logit|, which is 5 or more."""
PROMPT_LENGTHS = [5, 30, 17, 40, 9, 22, 70, 13]


@dataclass(slots=True)
class Oracle:
    """One architecture: its model and adapters on disk, and PEFT's answers."""

    folder: Path
    model: Path
    adapters: dict[str, Path]
    prompts: dict[str | None, list[int]]
    references: dict[str | None, Reference]
    tolerance: float = LOGIT_TOLERANCE
    settings: dict[str, object] = field(default_factory=dict)
    """For its engines: the device and the dtype that they compute in."""
    is_recurrent: bool = False
    """It has recurrent layers, whose states are saved before a prompt's last tokens."""
    packed: str = "packed"
    """The folder in which they pack the adapters."""

    def engine(self, **overrides: object) -> tuple[Engine, dict[str | None, str | None]]:
        """An engine with all adapters, and the digest of each name."""
        engine = make_engine(self.model, **self.settings | overrides)
        return engine, {None: None, **add_adapters(engine, self.adapters, self.folder / self.packed)}

    def requests(self, digests: dict[str | None, str | None], prefix: str = "") -> list[EngineRequest]:
        return [
            greedy(f"{prefix}{name}", prompt, NUM_TOKENS, digests[name], logprobs=VOCAB_SIZE)
            for name, prompt in self.prompts.items()
        ]

    def on(self, device: str, dtype: str) -> "Oracle":
        """The same answers, for engines on another device or in another dtype."""
        tolerance = LOGIT_TOLERANCE
        if dtype == "bfloat16":
            tolerance = TIMES_THE_ROUNDING_OF_PEFT * rounding_of_peft(self)
        settings: dict[str, object] = {"device": device, "dtype": dtype}
        return replace(self, tolerance=tolerance, settings=settings, packed=f"packed-{device}-{dtype}")

    def largest_packed_bytes(self) -> int:
        """The smallest arena in which each adapter fits on its own, as an engine packs them."""
        if not (self.folder / self.packed).exists():
            self.engine()
        return max(path.stat().st_size for path in (self.folder / self.packed).glob("*.packed"))

    def preempting(self, engine: Engine, num_spare_blocks: int = 8) -> dict[str, object]:
        """Settings for a KV cache that fits the longest sequence and `num_spare_blocks` blocks. No drafts: with them,
        some sequences finish before blocks run out.

        engine: any, to compute the size of a block from.
        """
        longest = max(len(prompt) for prompt in self.prompts.values()) + NUM_TOKENS
        runner = engine._runner
        block_bytes, state_bytes = (sum(t[0].nbytes for t in tensors) for tensors in (runner._caches, runner._states))
        num_blocks = -(-longest // 16) + num_spare_blocks
        return {
            "kv_cache_memory_bytes": num_blocks * block_bytes + len(self.prompts) * state_bytes,
            "max_num_seqs": len(self.prompts),
            "enable_prefix_caching": False,
            "num_speculative_tokens": 0,
            "max_model_len": longest,
        }


ConfigsOf = Callable[[PreTrainedModel], Mapping[str, LoraConfig]]
OracleOf = Callable[[str], Oracle]
"""Returns an architecture's oracle; see `oracle_of` in tests/inference/conftest.py."""


def make_oracle(architecture: str, folder: Path, configs: ConfigsOf = adapter_configs) -> Oracle:
    """configs: for at most seven adapters."""
    # Beyond the original length transformers itself picks the long factors, as the engine does at any length.
    extra = PHI3_ORIGINAL_LENGTH if architecture == "phi3" else 0
    oracle = oracle_of_saved(save_tiny_model(architecture, folder / "model"), folder, configs, extra)
    return replace(oracle, is_recurrent=architecture in RECURRENT)


def oracle_of_saved(
    model: PreTrainedModel, folder: Path, configs: ConfigsOf = adapter_configs, extra: int = 0
) -> Oracle:
    """For the model that the engine loads from folder / "model". extra: tokens added to every prompt."""
    adapters = save_adapters(model, folder / "adapters", configs(model))
    rng = random.Random(0)
    prompts: dict[str | None, list[int]] = {
        name: [rng.randrange(256) for _ in range(length + extra)]
        for name, length in zip([None, *adapters], PROMPT_LENGTHS[: len(adapters) + 1], strict=True)
    }
    references = reference_answers(model, adapters, prompts, NUM_TOKENS, VOCAB_SIZE)
    return Oracle(folder, folder / "model", adapters, prompts, references)


def rounding_of_peft(oracle: Oracle) -> float:
    """The most by which PEFT's logits in bfloat16 differ from those in float32, relative to the largest |logit|."""
    model = AutoModelForCausalLM.from_pretrained(oracle.model, dtype=torch.bfloat16, attn_implementation="eager").eval()
    tokens = {name: oracle.references[name].token_ids for name in oracle.prompts}
    rounded = forced_logits(model, oracle.adapters, oracle.prompts, tokens)
    return max(
        logits_difference(reference.logits[i], rounded[name][i, :VOCAB_SIZE].log_softmax(dim=-1))
        for name, reference in oracle.references.items()
        for i in range(NUM_TOKENS)
    )


def logits_difference(expected: torch.Tensor, logprobs: torch.Tensor) -> float:
    """The most by which log-probabilities differ from the expected logits', relative to the largest |logit|."""
    row = expected[:VOCAB_SIZE]
    return float((logprobs - torch.log_softmax(row, dim=-1)).abs().max() / row.abs().max())


def differs(reference: Reference, answer: Answer, tolerance: float = LOGIT_TOLERANCE) -> str | None:
    """What is wrong with the answer; None if it is right."""
    if answer.error is not None:
        return answer.error
    if len(answer.token_ids) != len(reference.token_ids):
        return f"{len(answer.token_ids)} tokens instead of {len(reference.token_ids)}"
    for i, (expected, token_id) in enumerate(zip(reference.token_ids, answer.token_ids, strict=True)):
        logprobs = torch.full((VOCAB_SIZE,), torch.nan)
        top_ids, values = zip(*answer.logprobs[i].top, strict=True)
        logprobs[list(top_ids)] = torch.tensor(values)
        difference = logits_difference(reference.logits[i], logprobs)
        if not difference <= tolerance:
            return f"logits at output {i} differ by {difference:.2g} of the largest"
        if token_id != expected:
            is_tie = reference.margin(i) < MARGIN * tolerance
            return None if is_tie else f"output {i} is {token_id} instead of {expected}"
    return None


def wrong_answers(oracle: Oracle, answers: Answers, prefix: str = "") -> dict[str | None, str]:
    found = {
        name: differs(reference, answers[f"{prefix}{name}", 0], oracle.tolerance)
        for name, reference in oracle.references.items()
    }
    return {name: reason for name, reason in found.items() if reason is not None}


def run_all(oracle: Oracle, **overrides: object) -> tuple[Engine, dict[str | None, str]]:
    engine, digests = oracle.engine(**overrides)
    return engine, wrong_answers(oracle, run(engine, oracle.requests(digests)))


def run_one_by_one(engine: Engine, requests: Sequence[EngineRequest]) -> Answers:
    """Each request arrives while earlier ones run."""
    answers: Answers = {}
    for request in requests:
        engine.add_request(request)
        collect(answers, engine.step())
    while engine.has_work():
        collect(answers, engine.step())
    return answers


def assert_right_after_eviction(oracle: Oracle) -> None:
    """Each answer of an engine whose arena fits one adapter, twice, with prompts in chunks."""
    engine, digests = oracle.engine(adapter_memory_bytes=oracle.largest_packed_bytes(), max_num_batched_tokens=16)
    for _ in range(2):
        assert not wrong_answers(oracle, run_one_by_one(engine, oracle.requests(digests)))
    assert engine.stats().num_adapter_evictions > 0


def with_rounded_base(oracle: Oracle, quantization: Quantization) -> Oracle:
    """PEFT's answers on the base model's rounded weights."""
    model = AutoModelForCausalLM.from_pretrained(oracle.model, attn_implementation="eager").eval()
    round_weights(model, quantization)
    return replace(oracle, references=reference_answers(model, oracle.adapters, oracle.prompts, NUM_TOKENS, VOCAB_SIZE))


def run_predicted(oracle: Oracle) -> tuple[Engine, Answers]:
    """One request after the other, each with a prediction in which every fourth token is wrong."""
    engine, digests = oracle.engine()
    answers: Answers = {}
    for name, request in zip(oracle.prompts, oracle.requests(digests), strict=True):
        tokens = oracle.references[name].token_ids
        predicted = [(token_id + 1) % 256 if i % 4 == 3 else token_id for i, token_id in enumerate(tokens)]
        answers |= run(engine, [replace(request, predicted_token_ids=predicted)])
    return engine, answers


def run_with_batch_mates(oracle: Oracle, engine: Engine, digests: dict[str | None, str | None], prefix: str) -> Answers:
    """Requests arrive at random steps among others, some of which are aborted."""
    rng = random.Random(7)
    requests = oracle.requests(digests, prefix) + [
        replace(request, request_id=f"mate-{request.request_id}", prompt_token_ids=request.prompt_token_ids[2:])
        for request in oracle.requests(digests)
    ]
    rng.shuffle(requests)
    answers: Answers = {}
    while requests or engine.has_work():
        for _ in range(rng.randrange(3)):
            if requests:
                engine.add_request(requests.pop())
        collect(answers, engine.step())
        if rng.random() < 0.2:
            collect(answers, engine.abort(f"mate-{rng.choice([*oracle.prompts])}"))
    return answers


def cached_tokens(oracle: Oracle) -> dict[str | None, int]:
    """Number of each prompt's tokens that a second turn finds in the cache."""
    num_last = UNCERTAIN_TOKENS if oracle.is_recurrent else 1
    return {name: max(len(prompt) - num_last, 0) // 16 * 16 for name, prompt in oracle.prompts.items()}


def plant(engine: Engine, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict], dict]) -> None:
    """Change the keyword arguments of every attention call; the engine must call it at each step and layer."""
    backend = type(engine._runner._model._context.backend)
    original = backend.paged_attention
    monkeypatch.setattr(backend, "paged_attention", lambda *args, **kwargs: original(*args, **change(kwargs)))

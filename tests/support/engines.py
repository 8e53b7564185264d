"""Engines on tiny models, and a loop that runs requests to their end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loraserve_adapters.pack import load_and_pack
from loraserve_adapters.packed_file import packed_file_name

from loraserve.engine.config import EngineConfig
from loraserve.engine.engine import Engine
from loraserve.engine.request import (
    BegunPrompt,
    EngineRequest,
    FinishReason,
    Pooling,
    PoolingParams,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
)

MIB = 1 << 20


def make_engine(model: Path, **overrides: object) -> Engine:
    """A small float32 engine that checks its invariants after every step; on a GPU it page-locks 8 MiB, not 4 GiB."""
    if overrides.get("backend") == "triton":
        assert "device" in overrides, "name it: auto is the CPU, which compiled kernels refuse where there is a GPU"
    settings: dict[str, object] = {
        "tokenizer": str(model / "tokenizer"),
        "dtype": "float32",
        "kv_cache_memory_bytes": 8 * MIB,
        "adapter_memory_bytes": 8 * MIB,
        "max_num_seqs": 32,
        "num_threads": 1,
        "check_invariants": True,
    }
    if str(overrides.get("device")).startswith("cuda"):
        settings["adapter_host_memory_bytes"] = 8 * MIB
    return Engine(EngineConfig(model=str(model), **settings | overrides), lambda *_: None)


def add_adapters(engine: Engine, adapters: dict[str, Path], cache_dir: Path) -> dict[str, str]:
    """Pack and load; returns the digest of each name."""
    digests = {}
    for name, folder in adapters.items():
        layout = engine.describe().layout
        packed = load_and_pack(folder, layout, cache_dir)
        engine.load_adapter(packed.digest, str(cache_dir / packed_file_name(packed.digest, layout)))
        digests[name] = packed.digest
    return digests


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    pooled: bytes | None = None
    error: str | None = None


Answers = dict[tuple[str, int], Answer]
"""By (request id, choice)."""


def run(engine: Engine, requests: Sequence[EngineRequest] = (), max_steps: int = 5000) -> Answers:
    """Add the requests and step until the engine is idle."""
    answers: Answers = {}

    def note_cached(begun: list[BegunPrompt]) -> None:
        for prompt in begun:
            answers.setdefault((prompt.request_id, 0), Answer()).num_cached_tokens = prompt.num_cached_tokens

    engine.on_prompts_begun = note_cached
    for request in requests:
        engine.add_request(request)
    for _ in range(max_steps):
        if not engine.has_work():
            return answers
        collect(answers, engine.step())
    raise AssertionError(f"the engine still has work after {max_steps} steps")


def collect(answers: Answers, outputs: Sequence[SequenceOutput]) -> None:
    for output in outputs:
        answer = answers.setdefault((output.request_id, output.index), Answer())
        assert answer.finish_reason is None, f"{output.request_id} gained output after it finished"
        answer.token_ids += output.token_ids
        answer.logprobs += output.logprobs or []
        answer.finish_reason = output.finish_reason
        answer.stop_token_id = output.stop_token_id
        answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
        answer.pooled = output.pooled
        answer.error = output.error


def greedy(request_id: str, prompt: Sequence[int], max_tokens: int, adapter: str | None = None, **extra: object):
    """A greedy request that runs to max_tokens."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **extra)
    return EngineRequest(request_id, list(prompt), sampling, adapter_digest=adapter)


def to_pool(request_id: str, prompt: Sequence[int], adapter: str | None = None, **params: object) -> EngineRequest:
    """A pooling request: by default for the unchanged hidden state of the last token."""
    pooling = PoolingParams(**{"pooling": Pooling.LAST, "normalize": False} | params)
    return EngineRequest(
        request_id, list(prompt), SamplingParams(max_tokens=1), adapter_digest=adapter, pooling=pooling
    )

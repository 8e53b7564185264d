"""The engine against PEFT in float32, one adapter at a time, for every architecture we claim."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend

from loraserve.engine import adapter_arrival, startup
from loraserve.engine.adapter_arrival import Arrival
from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest
from tests.support.engines import Answer, Answers, add_adapters, collect, greedy, make_engine, run
from tests.support.host_accelerator import HostAccelerator
from tests.support.tiny_adapters import Reference, reference_answers, save_adapters
from tests.support.tiny_models import CONFIGS, PHI3_ORIGINAL_LENGTH, save_tiny_model

NUM_TOKENS = 10
VOCAB_SIZE = 259
LOGIT_TOLERANCE = 1e-4
"""Of the largest |logit|."""
MARGIN = 1e-3
"""Where PEFT's own two best logits are closer than this, either token is right."""
PROMPT_LENGTHS = [5, 30, 17, 40, 9, 22, 70, 13]


@dataclass(slots=True)
class Oracle:
    """One architecture: its model and adapters on disk, and PEFT's answers."""

    folder: Path
    model: Path
    adapters: dict[str, Path]
    prompts: dict[str | None, list[int]]
    references: dict[str | None, Reference]

    def engine(self, **overrides: object) -> tuple[Engine, dict[str | None, str | None]]:
        """An engine with all adapters, and the digest of each name."""
        engine = make_engine(self.model, **overrides)
        return engine, {None: None, **add_adapters(engine, self.adapters, self.folder / "packed")}

    def requests(self, digests: dict[str | None, str | None], prefix: str = "") -> list[EngineRequest]:
        return [
            greedy(f"{prefix}{name}", prompt, NUM_TOKENS, digests[name], logprobs=VOCAB_SIZE)
            for name, prompt in self.prompts.items()
        ]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(request.param, tmp_path_factory.mktemp(request.param))


def make_oracle(architecture: str, folder: Path) -> Oracle:
    model = save_tiny_model(architecture, folder / "model")
    adapters = save_adapters(model, folder / "adapters")
    rng = random.Random(0)
    # Beyond the original length transformers itself picks the long factors, as the engine does at any length.
    extra = PHI3_ORIGINAL_LENGTH if architecture == "phi3" else 0
    prompts: dict[str | None, list[int]] = {
        name: [rng.randrange(256) for _ in range(length + extra)]
        for name, length in zip([None, *adapters], PROMPT_LENGTHS, strict=True)
    }
    references = reference_answers(model, adapters, prompts, NUM_TOKENS, VOCAB_SIZE)
    return Oracle(folder, folder / "model", adapters, prompts, references)


def differs(reference: Reference, answer: Answer) -> str | None:
    """What is wrong with the answer; None when it is right."""
    if answer.error is not None:
        return answer.error
    if len(answer.token_ids) != len(reference.token_ids):
        return f"{len(answer.token_ids)} tokens instead of {len(reference.token_ids)}"
    for i, (expected, token_id) in enumerate(zip(reference.token_ids, answer.token_ids, strict=True)):
        row = reference.logits[i, :VOCAB_SIZE]
        expected_logprobs = torch.log_softmax(row, dim=-1)
        logprobs = torch.empty(VOCAB_SIZE)
        for top_id, logprob in answer.logprobs[i].top:
            logprobs[top_id] = logprob
        difference = float((logprobs - expected_logprobs).abs().max() / row.abs().max())
        if not difference <= LOGIT_TOLERANCE:
            return f"logits at output {i} differ by {difference:.2g} of the largest"
        if token_id != expected:
            return None if reference.margin(i) < MARGIN else f"output {i} is {token_id} instead of {expected}"
    return None


def wrong_answers(oracle: Oracle, answers: Answers, prefix: str = "") -> dict[str | None, str]:
    found = {name: differs(reference, answers[f"{prefix}{name}", 0]) for name, reference in oracle.references.items()}
    return {name: reason for name, reason in found.items() if reason is not None}


def run_all(oracle: Oracle, **overrides: object) -> tuple[Engine, dict[str | None, str]]:
    engine, digests = oracle.engine(**overrides)
    return engine, wrong_answers(oracle, run(engine, oracle.requests(digests)))


def test_base_and_seven_adapters_in_one_batch_equal_peft(oracle: Oracle) -> None:
    engine, wrong = run_all(oracle)
    assert not wrong
    assert engine.stats().num_adapter_loads == 7


def test_reference_backend_equals_peft(oracle: Oracle) -> None:
    _, wrong = run_all(oracle, backend="reference")
    assert not wrong


def test_chunked_prompts_equal_peft(oracle: Oracle) -> None:
    engine, wrong = run_all(oracle, max_num_batched_tokens=11)
    assert not wrong
    assert max(engine.stats().recent_step_tokens) <= 11


def test_prefix_hits_equal_peft(oracle: Oracle) -> None:
    engine, digests = oracle.engine()
    run(engine, oracle.requests(digests, "first-"))
    answers = run(engine, oracle.requests(digests, "second-"))
    assert not wrong_answers(oracle, answers, "second-")
    hits = {name: answers[f"second-{name}", 0].num_cached_tokens for name in oracle.prompts}
    assert hits == {name: (len(prompt) - 1) // 16 * 16 for name, prompt in oracle.prompts.items()}


def test_forced_preemption_equals_peft(oracle: Oracle) -> None:
    longest = max(len(prompt) for prompt in oracle.prompts.values()) + NUM_TOKENS
    block_bytes = _block_bytes(oracle)
    engine, wrong = run_all(
        oracle,
        kv_cache_memory_bytes=(-(-longest // 16) + 8) * block_bytes,
        enable_prefix_caching=False,
        max_model_len=longest,
    )
    assert not wrong
    assert engine.stats().num_preemptions > 0


def test_eviction_and_reload_mid_stream_equals_peft(oracle: Oracle) -> None:
    """The arena holds the largest adapter and little more, so the adapters take turns."""
    packed_bytes = max(path.stat().st_size for path in _packed_files(oracle))
    engine, digests = oracle.engine(adapter_memory_bytes=packed_bytes)
    answers = run(engine, oracle.requests(digests, "first-"))
    answers |= run(engine, oracle.requests(digests, "second-"))
    assert not wrong_answers(oracle, answers, "first-")
    assert not wrong_answers(oracle, answers, "second-")
    assert engine.stats().num_adapter_evictions > 0


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is treated like a GPU, to which adapters come group by group."""

    monkeypatch.setattr(startup, "accelerator_of", lambda _: HostAccelerator())
    monkeypatch.setattr(adapter_arrival, "FIRST_PART_BYTES", 1)
    monkeypatch.setattr(adapter_arrival, "LARGEST_PART_BYTES", 1)


def run_on_device(oracle: Oracle, **overrides: object) -> tuple[Engine, dict[str | None, str]]:
    """Adapters take turns in the arena; requests come while others run. Returns what is wrong too."""
    packed_bytes = max(path.stat().st_size for path in _packed_files(oracle))
    engine, digests = oracle.engine(adapter_memory_bytes=packed_bytes, max_num_batched_tokens=64, **overrides)
    answers: Answers = {}
    for request in [*oracle.requests(digests, "first-"), *oracle.requests(digests, "second-")]:
        engine.add_request(request)
        collect(answers, engine.step())
    while engine.has_work():
        collect(answers, engine.step())
    return engine, wrong_answers(oracle, answers, "first-") | wrong_answers(oracle, answers, "second-")


@pytest.mark.parametrize("host_bytes", [None, 200_000, 0])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.usefixtures("_device")
def test_batches_and_adapters_that_are_copied_to_a_device_equal_peft(
    tmp_path: Path, backend: str, host_bytes: int | None
) -> None:
    """From a host tier that holds all of them, some or none; the backends compute layers as a whole, or not."""
    engine, wrong = run_on_device(make_oracle("llama", tmp_path), backend=backend, adapter_host_memory_bytes=host_bytes)
    assert not wrong
    assert engine.stats().num_adapter_evictions > 0


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.usefixtures("_device")
def test_oracle_notices_a_layer_that_does_not_wait_for_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    def wait_for_the_one_before(arrival: Arrival, group_index: int) -> None:
        arrival._wait(arrival._parts.part_of_group[group_index] - 1)

    monkeypatch.setattr(Arrival, "before_group", wait_for_the_one_before)
    _, wrong = run_on_device(make_oracle("llama", tmp_path), backend=backend)
    assert wrong


def test_batch_mates_do_not_matter(oracle: Oracle) -> None:
    """Requests arrive at random steps, some are aborted, and every answer is still PEFT's."""
    engine, digests = oracle.engine(max_num_batched_tokens=32)
    rng = random.Random(7)
    requests = oracle.requests(digests) + [
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
    assert not wrong_answers(oracle, answers)


@pytest.mark.parametrize(
    ("architecture", "dropped"),
    [("mistral", "sliding_window"), ("gemma2", "sliding_window"), ("gemma3", "sliding_window"), ("gemma2", "softcap")],
)
def test_oracle_notices_a_dropped_attention_feature(
    architecture: str, dropped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "decoder_layer", lambda *_: None)  # a fused layer has no attention call to change
    oracle = make_oracle(architecture, tmp_path)
    engine, digests = oracle.engine()
    _plant(engine, lambda kwargs: kwargs | {dropped: None})
    wrong = wrong_answers(oracle, run(engine, oracle.requests(digests)))
    longer_than_window = {name for name, prompt in oracle.prompts.items() if len(prompt) > 12}
    assert longer_than_window <= set(wrong)


@pytest.mark.parametrize("architecture", ["granite", "gemma2", "gemma3"])
def test_oracle_notices_a_wrong_attention_scaling(architecture: str, tmp_path: Path) -> None:
    oracle = make_oracle(architecture, tmp_path)
    engine, digests = oracle.engine()
    head_dim = 16
    _plant(engine, lambda kwargs: kwargs | {"scaling": head_dim**-0.5})
    assert set(wrong_answers(oracle, run(engine, oracle.requests(digests)))) == set(oracle.prompts)


def test_oracle_notices_each_missing_or_unscaled_adapter(tmp_path: Path) -> None:
    oracle = make_oracle("llama", tmp_path)
    for name in oracle.adapters:
        engine, digests = oracle.engine()
        wrong = wrong_answers(oracle, run(engine, oracle.requests({**digests, name: None})))
        assert set(wrong) == {name}
    engine, digests = oracle.engine()
    run(engine, oracle.requests(digests))
    assert engine._adapters is not None
    engine._adapters.table.scaling.mul_(1.02)
    answers = run(engine, oracle.requests(digests, "unscaled-"))
    assert set(wrong_answers(oracle, answers, "unscaled-")) == set(oracle.adapters)


def test_frozen_longrope_does_not_depend_on_batch_mates(tmp_path: Path) -> None:
    """transformers picks longrope's factors from the longest sequence of a batch; we from max_model_len."""
    save_tiny_model("phi3", tmp_path)
    short, long = [greedy(name, range(n), 8, logprobs=0) for name, n in (("short", 10), ("long", 100))]
    alone = run(make_engine(tmp_path, backend="reference"), [short])["short", 0]
    together = run(make_engine(tmp_path, backend="reference"), [short, long])["short", 0]
    assert alone.token_ids == together.token_ids
    assert [t.logprob for t in alone.logprobs] == pytest.approx([t.logprob for t in together.logprobs], abs=1e-5)


def _plant(engine: Engine, change) -> None:
    """Change the keyword arguments of every attention call."""
    backend = engine._runner._model._context.backend
    original = backend.paged_attention
    engine._runner._model._context.backend = _Planted(backend, lambda *args, **kw: original(*args, **change(kw)))


class _Planted:
    def __init__(self, backend: object, paged_attention: object) -> None:
        self._backend = backend
        self.paged_attention = paged_attention

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)


def _block_bytes(oracle: Oracle) -> int:
    engine = make_engine(oracle.model)
    return 8 * (1 << 20) // engine.stats().num_blocks


def _packed_files(oracle: Oracle) -> Sequence[Path]:
    oracle.engine()
    return list((oracle.folder / "packed").glob("*.packed"))

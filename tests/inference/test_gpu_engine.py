"""What only a GPU can show: the engine on CUDA against PEFT, its graphs against eager steps, and loads beside them."""

import gc
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from loraserve.engine import adapter_arrival
from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams
from tests.support.engines import MIB, Answers, add_adapters, collect, greedy, make_engine, run
from tests.support.tiny_adapters import Reference, reference_answers, save_adapters
from tests.support.tiny_models import save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_TOKENS = 10
VOCAB_SIZE = 259
LENGTHS = (5, 30, 17, 40, 9, 22, 70, 13)
TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2}
"""Of the largest |logit|: rounding, as the check at load time allows it."""
MARGIN = {"float32": 1e-3, "bfloat16": 0.5}
"""Where PEFT's own two best logits are closer, either token is right, and what follows is another text."""


class Model:
    def __init__(self, folder: Path, architecture: str) -> None:
        self.folder = folder
        model = save_tiny_model(architecture, folder / "model")
        self._adapters = save_adapters(model, folder / "adapters")
        self.names: list[str | None] = [None, *self._adapters]
        rng = random.Random(0)
        self.prompts = {
            name: rng.choices(range(256), k=length) for name, length in zip(self.names, LENGTHS, strict=True)
        }
        self.references = reference_answers(model, self._adapters, self.prompts, NUM_TOKENS, VOCAB_SIZE)

    def engine(self, **overrides: object) -> tuple[Engine, dict[str | None, str | None]]:
        engine = make_engine(
            self.folder / "model",
            device="cuda",
            **{"max_num_seqs": 8, "adapter_host_memory_bytes": 8 * MIB} | overrides,
        )
        return engine, {None: None, **add_adapters(engine, self._adapters, self.folder / "packed")}

    def requests(
        self, digests: dict[str | None, str | None], names: Sequence[str | None], turn: str = ""
    ) -> list[EngineRequest]:
        return [
            greedy(f"{turn}{name}", self.prompts[name], NUM_TOKENS, digests[name], logprobs=VOCAB_SIZE)
            for name in names
        ]

    def wrong(self, answers: Answers, dtype: str, turn: str = "") -> dict[str | None, str]:
        found = {name: self._difference(name, answers, dtype, turn) for name in self.names}
        return {name: reason for name, reason in found.items() if reason is not None}

    def _difference(self, name: str | None, answers: Answers, dtype: str, turn: str) -> str | None:
        answer, reference = answers[f"{turn}{name}", 0], self.references[name]
        if answer.error is not None:
            return answer.error
        for i, expected in enumerate(reference.token_ids):
            row = reference.logits[i, :VOCAB_SIZE]
            logprobs = torch.empty(VOCAB_SIZE)
            for token_id, logprob in answer.logprobs[i].top:
                logprobs[token_id] = logprob
            difference = float((logprobs - row.log_softmax(-1)).abs().max() / row.abs().max())
            if not difference <= TOLERANCE[dtype]:
                return f"logits at output {i} differ by {difference:.2g} of the largest"
            if answer.token_ids[i] != expected:
                return self._tie(reference, i, dtype)
        return None

    def _tie(self, reference: Reference, i: int, dtype: str) -> str | None:
        return None if reference.margin(i) < MARGIN[dtype] else f"output {i} is not {reference.token_ids[i]}"


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("llama-alone"), "llama")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_and_seven_adapters_in_one_batch_equal_peft(model: Model, dtype: str) -> None:
    engine, digests = model.engine(dtype=dtype)
    description = engine.describe()
    assert (description.device, description.backend) == ("cuda:0", "triton")
    assert not model.wrong(run(engine, model.requests(digests, model.names)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llama_is_computed_layer_by_layer_and_without_transformers_between(llama: Model, dtype: str) -> None:
    engine, _ = llama.engine(dtype=dtype)
    assert [note for note in engine.describe().notes if "not used" in note] == []


def test_chunked_prompts_and_prefix_hits_equal_peft(model: Model) -> None:
    engine, digests = model.engine(max_num_batched_tokens=11)
    first = run(engine, model.requests(digests, model.names, "first"))
    second = run(engine, model.requests(digests, model.names, "second"))
    assert not model.wrong(first, "float32", "first")
    assert not model.wrong(second, "float32", "second")
    assert sum(answer.num_cached_tokens for answer in second.values()) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replays_give_the_bits_of_eager_steps(llama: Model, dtype: str) -> None:
    """Of as many rows as a graph has: libraries choose other kernels for other shapes."""
    answers = []
    for enforce_eager in (False, True):
        engine, digests = llama.engine(dtype=dtype, enforce_eager=enforce_eager)
        answers.append(run(engine, llama.requests(digests, llama.names)))
    for key, replayed in answers[0].items():
        eager = answers[1][key]
        assert replayed.token_ids == eager.token_ids, key
        assert [token.top for token in replayed.logprobs] == [token.top for token in eager.logprobs], key


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_steps_queued_ahead_give_the_tokens_of_steps_one_by_one(llama: Model, enforce_eager: bool) -> None:
    """Half of them drawn. The first turn brings the adapters, so that both engines compute the same batches then."""
    answers = []
    for is_ahead in (True, False):
        engine, digests = llama.engine(enforce_eager=enforce_eager, enable_prefix_caching=False)
        if not is_ahead:
            engine._scheduler.try_schedule_ahead = lambda ends: None
        run(engine, llama.requests(digests, llama.names, "first"))
        for i, name in enumerate(llama.names):
            sampling = SamplingParams(max_tokens=40, temperature=i % 2, seed=i, ignore_eos=True)
            engine.add_request(EngineRequest(f"{name}", llama.prompts[name], sampling, digests[name]))
        answers.append({})
        num_ahead = 0
        while engine.has_work():
            collect(answers[-1], engine.step())
            num_ahead += engine._in_flight is not None
        assert num_ahead == (39 if is_ahead else 0)
    assert answers[0] == answers[1]


def test_one_graph_serves_more_adapters_and_larger_ranks_than_it_first_saw(llama: Model) -> None:
    engine, digests = llama.engine()
    run(engine, llama.requests(digests, ["rank1"], "first"))
    run(engine, llama.requests(digests, [None], "base"))
    assert not llama.wrong(run(engine, llama.requests(digests, llama.names)), "float32")


@pytest.mark.parametrize("host_bytes", [0, 8 * MIB])
def test_adapters_loaded_and_evicted_mid_stream_equal_peft(
    llama: Model, monkeypatch: pytest.MonkeyPatch, host_bytes: int
) -> None:
    """The arena holds the largest adapter and little more; each request arrives while others decode.

    Every linear group comes in a part of its own.
    """
    monkeypatch.setattr(adapter_arrival, "FIRST_PART_BYTES", 1)
    monkeypatch.setattr(adapter_arrival, "LARGEST_PART_BYTES", 1)
    llama.engine()
    largest = max(path.stat().st_size for path in llama.folder.glob("packed/*.packed"))
    engine, digests = llama.engine(
        adapter_memory_bytes=largest, adapter_host_memory_bytes=host_bytes, enable_prefix_caching=False
    )
    answers: Answers = {}
    for request in llama.requests(digests, llama.names, "first"):
        engine.add_request(request)
        collect(answers, engine.step())
    while engine.has_work():
        collect(answers, engine.step())
    answers |= run(engine, llama.requests(digests, llama.names, "second"))
    assert not llama.wrong(answers, "float32", "first")
    assert not llama.wrong(answers, "float32", "second")
    assert engine.stats().num_adapter_evictions > 0


def test_cache_and_arena_are_sized_by_what_the_gpu_has_left(llama: Model) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    engine, _ = llama.engine(kv_cache_memory_bytes=None, adapter_memory_bytes=None, gpu_memory_utilization=0.25)
    description = engine.describe()
    taken = free_before - torch.cuda.mem_get_info()[0]
    assert description.arena_size_bytes > 100 * MIB
    assert 0.15 * free_before < taken < 0.3 * total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_float8_cache_gives_what_it_gives_in_plain_torch(llama: Model, dtype: str) -> None:
    """At the first token, of which nothing has been chosen yet; a key between two values may be rounded to either."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU does not convert e4m3")
    first_rows = []
    for backend in ("triton", "reference"):
        engine, digests = llama.engine(dtype=dtype, backend=backend, kv_cache_dtype="fp8")
        answers = run(engine, llama.requests(digests, llama.names))
        first_rows.append([dict(answers[key].logprobs[0].top) for key in sorted(answers)])
    for found, expected in zip(*first_rows, strict=True):
        largest = max(abs(value) for value in expected.values())
        difference = max(abs(found[token_id] - value) for token_id, value in expected.items())
        assert difference <= 2 * TOLERANCE["bfloat16"] * largest

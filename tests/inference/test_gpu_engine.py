"""What only a GPU can show: its graphs against eager steps, and adapter loads while steps run.

`test_oracle_bfloat16.py` and `test_oracle_float32_on_gpu.py` compare answers on CUDA with PEFT's.
"""

import gc

import pytest
import torch

from loraserve.engine.adapters import arrival
from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.engine.steps import graphs
from tests.support.engines import MIB, collect, greedy, run
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, make_oracle, run_one_by_one, wrong_answers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FLOAT8_TOLERANCE = 0.12
"""Relative to the largest |log-probability|."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle("llama", tmp_path_factory.mktemp("llama")).on("cuda", "float32")


def engine_of(oracle: Oracle, **overrides: object) -> tuple[Engine, dict[str | None, str | None]]:
    return oracle.engine(**{"max_num_seqs": 8} | overrides)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llama_uses_fused_layers_and_the_direct_forward(llama: Oracle, dtype: str) -> None:
    engine, _ = engine_of(llama, dtype=dtype)
    assert [note for note in engine.describe().notes if "not used" in note] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graph_replays_give_the_same_bits_as_eager_steps(
    llama: Oracle, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have as many rows as a graph, even with prompts: libraries choose other kernels for other shapes.

    The first turn loads the adapters, so that both engines compute the same batches afterwards.
    """
    num_rows = sum(len(prompt) for prompt in llama.prompts.values())
    monkeypatch.setattr(graphs, "PROMPT_SIZES", (num_rows,))
    answers = []
    for enforce_eager in (False, True):
        engine, digests = engine_of(llama, dtype=dtype, enforce_eager=enforce_eager, enable_prefix_caching=False)
        run(engine, llama.requests(digests, "first-"))
        answers.append(run(engine, llama.requests(digests)))
    assert answers[0].keys() == answers[1].keys()
    for key, replayed in answers[0].items():
        eager = answers[1][key]
        assert replayed.token_ids == eager.token_ids, key
        assert [token.top for token in replayed.logprobs] == [token.top for token in eager.logprobs], key


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_steps_queued_ahead_give_the_same_tokens_as_steps_one_by_one(llama: Oracle, enforce_eager: bool) -> None:
    """Half of the requests sample. The first turn loads the adapters, so that both engines then run equal batches."""
    answers = []
    for is_ahead in (True, False):
        engine, digests = engine_of(llama, enforce_eager=enforce_eager, enable_prefix_caching=False)
        if not is_ahead:
            engine._scheduler.try_schedule_ahead = lambda ends: None
        run(engine, llama.requests(digests, "first-"))
        for i, name in enumerate(llama.prompts):
            sampling = SamplingParams(max_tokens=40, temperature=i % 2, seed=i, ignore_eos=True)
            engine.add_request(EngineRequest(f"{name}", llama.prompts[name], sampling, digests[name]))
        answers.append({})
        num_ahead = 0
        while engine.has_work():
            collect(answers[-1], engine.step())
            num_ahead += engine._in_flight is not None
        assert num_ahead == (39 if is_ahead else 0)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_graph_serves_more_adapters_and_larger_ranks_than_its_first_batches_had(llama: Oracle, dtype: str) -> None:
    oracle = llama.on("cuda", dtype)
    engine, digests = engine_of(oracle)
    for name in ("rank1", None):
        run(engine, [greedy(f"first-{name}", llama.prompts[name], NUM_TOKENS, digests[name], logprobs=VOCAB_SIZE)])
    assert not wrong_answers(oracle, run(engine, oracle.requests(digests)))


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_adapters_loaded_without_a_host_tier_equal_peft(
    llama: Oracle, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena has room for little more than the largest adapter; each request arrives while others decode.

    Every linear group arrives as a separate part: a replay waits for all parts, a layer of an eager step for its own.
    """
    monkeypatch.setattr(arrival, "FIRST_PART_BYTES", 1)
    monkeypatch.setattr(arrival, "LARGEST_PART_BYTES", 1)
    engine_of(llama)
    engine, digests = engine_of(
        llama,
        adapter_memory_bytes=llama.largest_packed_bytes(),
        adapter_host_memory_bytes=0,
        enable_prefix_caching=False,
        enforce_eager=enforce_eager,
    )
    answers = run_one_by_one(engine, llama.requests(digests, "first-"))
    answers |= run(engine, llama.requests(digests, "second-"))
    assert not wrong_answers(llama, answers, "first-")
    assert not wrong_answers(llama, answers, "second-")
    assert engine.stats().num_adapter_evictions > 0


def test_cache_and_arena_are_sized_from_the_free_gpu_memory(llama: Oracle) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    engine, _ = engine_of(llama, kv_cache_memory_bytes=None, adapter_memory_bytes=None, gpu_memory_utilization=0.25)
    description = engine.describe()
    taken = free_before - torch.cuda.mem_get_info()[0]
    assert description.arena_size_bytes > 100 * MIB
    assert 0.15 * free_before < taken < 0.3 * total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_float8_cache_gives_about_the_reference_backends_logprobs(llama: Oracle, dtype: str) -> None:
    """For the first token, before any choice can differ; a key between two values may be rounded to either."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU does not convert e4m3")
    first_rows = []
    for backend in ("triton", "reference"):
        engine, digests = engine_of(llama, dtype=dtype, backend=backend, kv_cache_dtype="fp8")
        answers = run(engine, llama.requests(digests))
        first_rows.append([dict(answers[key].logprobs[0].top) for key in sorted(answers)])
    for found, expected in zip(*first_rows, strict=True):
        largest = max(abs(value) for value in expected.values())
        difference = max(abs(found[token_id] - value) for token_id, value in expected.items())
        assert difference <= FLOAT8_TOLERANCE * largest

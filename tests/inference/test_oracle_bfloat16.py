"""The oracle in bfloat16, on the CPU and on a GPU, with as few engines as its cases need.

`test_oracle_float32_on_gpu.py` runs the same cases in float32; `test_oracle.py` covers float32 on the CPU.
"""

from dataclasses import dataclass

import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend

from loraserve.engine.adapters import arrival
from loraserve.engine.engine import Engine
from tests.support.engines import run
from tests.support.peft_oracle import (
    Oracle,
    OracleOf,
    cached_tokens,
    plant,
    run_one_by_one,
    run_predicted,
    run_with_batch_mates,
    wrong_answers,
)
from tests.support.tiny_models import CONFIGS, RECURRENT, WINDOW

ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
Place = tuple[str, str]
"""Device and dtype."""
MAX_NUM_SEQS = 8
"""Of every engine: enough for all prompts at once, with few graphs to record."""
CHUNK = 32


@dataclass(slots=True)
class Served:
    """One architecture's expected answers, and an engine in one place."""

    oracle: Oracle
    engine: Engine
    digests: dict[str | None, str | None]

    def wrong(self, prefix: str) -> dict[str | None, str]:
        """Wrong answers of a turn with one request per digest."""
        return wrong_answers(self.oracle, run(self.engine, self.oracle.requests(self.digests, prefix)), prefix)


@pytest.fixture(scope="module", params=sorted(CONFIGS | RECURRENT))
def float32_oracle(request: pytest.FixtureRequest, oracle_of: OracleOf) -> Oracle:
    return oracle_of(request.param)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("cpu", "bfloat16"), id="cpu"),
        pytest.param(("cuda", "bfloat16"), id="cuda", marks=ON_A_GPU),
    ],
)
def place(request: pytest.FixtureRequest) -> Place:
    return request.param


@pytest.fixture(scope="module")
def served(place: Place, float32_oracle: Oracle) -> Served:
    if float32_oracle.is_recurrent and place[0] != "cpu":
        pytest.skip("recurrent layers run on CPUs alone")
    return serve(float32_oracle, place, max_num_batched_tokens=CHUNK)


def serve(float32_oracle: Oracle, place: Place, **overrides: object) -> Served:
    oracle = float32_oracle.on(*place)
    engine, digests = oracle.engine(max_num_seqs=MAX_NUM_SEQS, **overrides)
    return Served(oracle, engine, digests)


def test_engine_computes_in_its_place(served: Served) -> None:
    description = served.engine.describe()
    expected = ("cuda:0", "triton") if served.oracle.settings["device"] == "cuda" else ("cpu", "cpu")
    assert (description.device, description.backend) == expected
    assert description.dtype == served.oracle.settings["dtype"]


def test_chunks_prefix_hits_and_batch_mates_equal_peft(served: Served) -> None:
    """Three turns on one engine: in chunks, with prefix hits, and with batch mates that may be aborted."""
    oracle, engine, digests = served.oracle, served.engine, served.digests
    assert not served.wrong("first-")
    assert max(engine.stats().recent_step_tokens) <= CHUNK
    answers = run(engine, oracle.requests(digests, "second-"))
    assert not wrong_answers(oracle, answers, "second-")
    hits = {name: answers[f"second-{name}", 0].num_cached_tokens for name in oracle.prompts}
    assert hits == cached_tokens(oracle)
    assert not wrong_answers(oracle, run_with_batch_mates(oracle, engine, digests, "third-"), "third-")


def test_preemption_and_eviction_mid_stream_equal_peft(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the cache nor the arena has room for all; each linear group arrives on a GPU as a separate part."""
    monkeypatch.setattr(arrival, "FIRST_PART_BYTES", 1)
    monkeypatch.setattr(arrival, "LARGEST_PART_BYTES", 1)
    oracle = served.oracle
    engine, digests = oracle.engine(
        adapter_memory_bytes=oracle.largest_packed_bytes(),
        **oracle.preempting(served.engine, num_spare_blocks=2),
    )
    answers = run_one_by_one(engine, oracle.requests(digests, "first-"))
    answers |= run(engine, oracle.requests(digests, "second-"))
    assert not wrong_answers(oracle, answers, "first-")
    assert not wrong_answers(oracle, answers, "second-")
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_adapter_evictions > 0


def test_drafted_tokens_equal_peft(served: Served) -> None:
    if served.engine.describe().num_speculative_tokens == 0:
        pytest.skip("GPUs have no drafts")
    engine, answers = run_predicted(served.oracle)
    assert not wrong_answers(served.oracle, answers)
    assert engine.stats().num_accepted_tokens > 0


def test_oracle_notices_each_missing_adapter(served: Served) -> None:
    """With the tolerance that allows for rounding, in every architecture."""
    digests = {**served.digests, **dict.fromkeys(served.oracle.adapters)}
    answers = run(served.engine, served.oracle.requests(digests, "missing-"))
    assert set(wrong_answers(served.oracle, answers, "missing-")) == set(served.oracle.adapters)


@pytest.mark.parametrize(
    ("architecture", "dropped"),
    [("mistral", "sliding_window"), ("gemma2", "sliding_window"), ("gemma3", "sliding_window"), ("gemma2", "softcap")],
)
def test_oracle_notices_a_dropped_attention_feature_in_bfloat16(
    architecture: str, dropped: str, oracle_of: OracleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "decoder_layer", lambda *_: None)  # a fused layer has no attention call to change
    served = serve(oracle_of(architecture), ("cpu", "bfloat16"))
    plant(served.engine, monkeypatch, lambda kwargs: kwargs | {dropped: None})
    longer_than_window = {name for name, prompt in served.oracle.prompts.items() if len(prompt) > WINDOW}
    assert longer_than_window <= set(served.wrong("dropped-"))

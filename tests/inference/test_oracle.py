"""The engine against PEFT in float32, one adapter at a time, for every architecture we claim to support."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend

from loraserve.engine import startup
from loraserve.engine.adapters import arrival as adapter_arrival
from loraserve.engine.adapters.arrival import Arrival
from loraserve.engine.engine import Engine
from loraserve.engine.request import Pooling
from tests.support.engines import Answers, greedy, make_engine, run, to_pool
from tests.support.host_accelerator import HostAccelerator
from tests.support.peft_oracle import (
    LOGIT_TOLERANCE,
    Oracle,
    OracleOf,
    cached_tokens,
    plant,
    run_all,
    run_one_by_one,
    run_predicted,
    run_with_batch_mates,
    wrong_answers,
)
from tests.support.tiny_models import FAMILIES, save_tiny_model


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def oracle(request: pytest.FixtureRequest, oracle_of: OracleOf) -> Oracle:
    return oracle_of(request.param)


@dataclass(slots=True)
class Served:
    """An engine with `make_engine`'s settings that has answered every request once."""

    engine: Engine
    digests: dict[str | None, str | None]
    num_adapter_loads: int
    first: Answers
    """Request ids start with `first-`."""


@pytest.fixture(scope="module")
def served(oracle: Oracle) -> Served:
    engine, digests = oracle.engine()
    answers = run(engine, oracle.requests(digests, "first-"))
    return Served(engine, digests, engine.stats().num_adapter_loads, answers)


def test_base_and_seven_adapters_in_one_batch_equal_peft(oracle: Oracle, served: Served) -> None:
    assert not wrong_answers(oracle, served.first, "first-")
    assert served.num_adapter_loads == 7


def test_reference_backend_equals_peft(oracle: Oracle) -> None:
    _, wrong = run_all(oracle, backend="reference")
    assert not wrong


def test_chunked_prompts_equal_peft(oracle: Oracle) -> None:
    engine, wrong = run_all(oracle, max_num_batched_tokens=11)
    assert not wrong
    assert max(engine.stats().recent_step_tokens) <= 11


def test_drafted_tokens_equal_peft(oracle: Oracle) -> None:
    engine, answers = run_predicted(oracle)
    assert not wrong_answers(oracle, answers)
    stats = engine.stats()
    if engine.describe().num_speculative_tokens == 0:  # mixtures of experts
        assert stats.num_draft_tokens == 0
    else:
        assert stats.num_draft_tokens > stats.num_accepted_tokens > len(oracle.prompts)


def test_prefix_hits_equal_peft(oracle: Oracle, served: Served) -> None:
    answers = run(served.engine, oracle.requests(served.digests, "second-"))
    assert not wrong_answers(oracle, answers, "second-")
    hits = {name: answers[f"second-{name}", 0].num_cached_tokens for name in oracle.prompts}
    assert hits == cached_tokens(oracle)


def test_pooled_hidden_states_equal_peft_in_a_batch_with_text_requests(oracle: Oracle, served: Served) -> None:
    requests = oracle.requests(served.digests, "beside-")
    for pooling in Pooling:
        requests += [
            to_pool(f"{pooling}-{name}", prompt, served.digests[name], pooling=pooling)
            for name, prompt in oracle.prompts.items()
        ]
    answers = run(served.engine, requests)
    assert not wrong_answers(oracle, answers, "beside-")
    for name, reference in oracle.references.items():
        hidden = reference.hidden
        for pooling, expected in ((Pooling.LAST, hidden[-1]), (Pooling.MEAN, hidden.mean(dim=0))):
            answer = answers[f"{pooling}-{name}", 0]
            assert answer.pooled is not None, answer.error
            vector = torch.frombuffer(bytearray(answer.pooled), dtype=torch.float32)
            assert (vector - expected).abs().max() <= LOGIT_TOLERANCE * hidden.abs().max(), (name, pooling)


def test_forced_preemption_equals_peft(oracle: Oracle, served: Served) -> None:
    engine, wrong = run_all(oracle, **oracle.preempting(served.engine))
    assert not wrong
    assert engine.stats().num_preemptions > 0


def test_eviction_and_reload_mid_stream_equals_peft(oracle: Oracle) -> None:
    """The arena has room for little more than the largest adapter, so adapters take turns."""
    engine, digests = oracle.engine(adapter_memory_bytes=oracle.largest_packed_bytes())
    answers = run(engine, oracle.requests(digests, "first-"))
    answers |= run(engine, oracle.requests(digests, "second-"))
    assert not wrong_answers(oracle, answers, "first-")
    assert not wrong_answers(oracle, answers, "second-")
    assert engine.stats().num_adapter_evictions > 0


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats the CPU like a GPU, to which adapters are copied group by group."""

    monkeypatch.setattr(startup, "accelerator_of", lambda _: HostAccelerator())
    monkeypatch.setattr(adapter_arrival, "FIRST_PART_BYTES", 1)
    monkeypatch.setattr(adapter_arrival, "LARGEST_PART_BYTES", 1)


def run_on_device(oracle: Oracle, **overrides: object) -> tuple[Engine, dict[str | None, str]]:
    """Adapters take turns in the arena; requests arrive while others run. Also returns the wrong answers."""
    engine, digests = oracle.engine(
        adapter_memory_bytes=oracle.largest_packed_bytes(), max_num_batched_tokens=64, **overrides
    )
    answers = run_one_by_one(engine, [*oracle.requests(digests, "first-"), *oracle.requests(digests, "second-")])
    return engine, wrong_answers(oracle, answers, "first-") | wrong_answers(oracle, answers, "second-")


@pytest.mark.parametrize("host_bytes", [None, 200_000, 0])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.usefixtures("_device")
def test_batches_and_adapters_copied_to_a_device_equal_peft(
    oracle_of: OracleOf, backend: str, host_bytes: int | None
) -> None:
    """The host tier has room for all adapters, some or none; one backend fuses layers, the other does not."""
    engine, wrong = run_on_device(oracle_of("llama"), backend=backend, adapter_host_memory_bytes=host_bytes)
    assert not wrong
    assert engine.stats().num_adapter_evictions > 0


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.usefixtures("_device")
def test_oracle_notices_a_layer_that_does_not_wait_for_its_adapter(
    oracle_of: OracleOf, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    def wait_for_the_one_before(arrival: Arrival, group_index: int) -> None:
        arrival._wait(arrival._parts.part_of_group[group_index] - 1)

    monkeypatch.setattr(Arrival, "before_group", wait_for_the_one_before)
    _, wrong = run_on_device(oracle_of("llama"), backend=backend)
    assert wrong


def test_answers_do_not_depend_on_batch_mates(oracle: Oracle) -> None:
    """Requests arrive at random steps, some are aborted, and every answer is still PEFT's."""
    engine, digests = oracle.engine(max_num_batched_tokens=32)
    answers = run_with_batch_mates(oracle, engine, digests, "")
    assert not wrong_answers(oracle, answers)


@pytest.mark.parametrize(
    ("architecture", "dropped"),
    [("mistral", "sliding_window"), ("gemma2", "sliding_window"), ("gemma3", "sliding_window"), ("gemma2", "softcap")],
)
def test_oracle_notices_a_dropped_attention_feature(
    architecture: str, dropped: str, oracle_of: OracleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "decoder_layer", lambda *_: None)  # a fused layer has no attention call to change
    oracle = oracle_of(architecture)
    engine, digests = oracle.engine()
    plant(engine, monkeypatch, lambda kwargs: kwargs | {dropped: None})
    wrong = wrong_answers(oracle, run(engine, oracle.requests(digests)))
    longer_than_window = {name for name, prompt in oracle.prompts.items() if len(prompt) > 12}
    assert longer_than_window <= set(wrong)


@pytest.mark.parametrize("architecture", ["granite", "gemma2", "gemma3"])
def test_oracle_notices_a_wrong_attention_scaling(
    architecture: str, oracle_of: OracleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = oracle_of(architecture)
    engine, digests = oracle.engine()
    head_dim = 16
    plant(engine, monkeypatch, lambda kwargs: kwargs | {"scaling": head_dim**-0.5})
    assert set(wrong_answers(oracle, run(engine, oracle.requests(digests)))) == set(oracle.prompts)


def test_oracle_notices_each_missing_or_unscaled_adapter(oracle_of: OracleOf) -> None:
    oracle = oracle_of("llama")
    engine, digests = oracle.engine()
    for name in oracle.adapters:
        answers = run(engine, oracle.requests({**digests, name: None}, f"no-{name}-"))
        assert set(wrong_answers(oracle, answers, f"no-{name}-")) == {name}
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

"""DoRA in one batch with plain adapters and the base model, against PEFT, which computes one adapter at a time."""

from functools import cache
from pathlib import Path

import pytest
import torch
from loraserve_kernels.quantization import ROUNDINGS, Quantization
from safetensors.torch import load_file, save_file

from tests.support.engines import make_engine, run
from tests.support.peft_oracle import (
    Oracle,
    OracleOf,
    make_oracle,
    run_all,
    run_one_by_one,
    with_rounded_base,
    wrong_answers,
)
from tests.support.tiny_adapters import dora_configs
from tests.support.tiny_models import FAMILIES

DORA = {"dora1", "dora_layer5", "dora_head9", "dora_patterns70"}


@pytest.fixture(scope="module")
def dora_of(tmp_path_factory: pytest.TempPathFactory) -> OracleOf:
    return cache(lambda architecture: make_oracle(architecture, tmp_path_factory.mktemp(architecture), dora_configs))


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_dora_adapters_equal_peft_in_a_mixed_batch(dora_of: OracleOf, architecture: str) -> None:
    _, wrong = run_all(dora_of(architecture))
    assert not wrong


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_dora_adapters_equal_peft_on_the_reference_backend(dora_of: OracleOf, architecture: str) -> None:
    _, wrong = run_all(dora_of(architecture), backend="reference")
    assert not wrong


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2"])
def test_dora_adapters_in_bfloat16_are_about_as_accurate_as_peft(dora_of: OracleOf, architecture: str) -> None:
    _, wrong = run_all(dora_of(architecture).on("cpu", "bfloat16"))
    assert not wrong


@pytest.mark.parametrize("quantization", ROUNDINGS)
def test_dora_adapters_on_quantized_weights_equal_peft_on_the_rounded_weights(
    dora_of: OracleOf, quantization: Quantization
) -> None:
    _, wrong = run_all(with_rounded_base(dora_of("qwen2"), quantization), quantization=quantization)
    assert not wrong


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dora_adapters_equal_peft_on_a_gpu(dora_of: OracleOf, dtype: str) -> None:
    """The base model has biases. Adapters are loaded while steps run."""
    _, wrong = run_all(dora_of("qwen2").on("cuda", dtype), max_num_seqs=8)
    assert not wrong


@pytest.mark.parametrize("num_rows", [7, 33])
def test_dora_adapters_equal_peft_in_chunks(dora_of: OracleOf, num_rows: int) -> None:
    oracle = dora_of("qwen2")
    engine, digests = oracle.engine(max_num_batched_tokens=num_rows)
    assert not wrong_answers(oracle, run_one_by_one(engine, oracle.requests(digests)))


def test_dora_adapters_equal_peft_after_preemption(dora_of: OracleOf) -> None:
    oracle = dora_of("llama")
    engine, wrong = run_all(oracle, **oracle.preempting(make_engine(oracle.model)))
    assert not wrong
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_magnitudes_survive_eviction_and_compaction(dora_of: OracleOf, dtype: str) -> None:
    oracle = dora_of("qwen2").on("cpu", dtype)
    engine, digests = oracle.engine(adapter_memory_bytes=oracle.largest_packed_bytes())
    answers = run(engine, oracle.requests(digests, "first-"))
    answers |= run(engine, oracle.requests(digests, "second-"))
    assert not wrong_answers(oracle, answers, "first-")
    assert not wrong_answers(oracle, answers, "second-")
    assert engine.stats().num_adapter_evictions > 0


def test_oracle_notices_missing_magnitudes(dora_of: OracleOf) -> None:
    oracle = dora_of("llama")
    engine, digests = oracle.engine()
    run(engine, oracle.requests(digests, "first-"))
    table = engine._adapters.table if engine._adapters is not None else None
    assert table is not None
    table.offset_magnitude.fill_(-1)
    assert set(wrong_answers(oracle, run(engine, oracle.requests(digests, "plain-")), "plain-")) == DORA


def test_an_untrained_dora_adapter_answers_like_the_base_model(dora_of: OracleOf, tmp_path: Path) -> None:
    """PEFT initializes magnitudes with the norms of the base model's weights, so all factors are 1."""
    oracle = dora_of("qwen2")
    folder = tmp_path / "untrained"
    folder.mkdir()
    source = oracle.adapters["dora1"]
    (folder / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    base = load_file(oracle.model / "model.safetensors")
    tensors = {
        name: base[f"{name.removeprefix('base_model.model.').removesuffix('.lora_magnitude_vector')}.weight"].norm(
            dim=1
        )
        if name.endswith("magnitude_vector")
        else (torch.zeros_like(tensor) if "lora_B" in name else tensor)
        for name, tensor in load_file(source / "adapter_model.safetensors").items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    untrained = Oracle(
        tmp_path,
        oracle.model,
        {"untrained": folder},
        {"untrained": oracle.prompts[None]},
        {"untrained": oracle.references[None]},
    )
    _, wrong = run_all(untrained)
    assert not wrong

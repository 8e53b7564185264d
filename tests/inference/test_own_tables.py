"""Adapters with an embedding or `lm_head` of their own (`modules_to_save`), against PEFT."""

from functools import cache
from pathlib import Path

import pytest
import torch
from loraserve_kernels.quantization import ROUNDINGS, Quantization

from loraserve.models.context import ForwardContext
from tests.support.peft_oracle import (
    Oracle,
    OracleOf,
    assert_right_after_eviction,
    oracle_of_saved,
    run_all,
    with_rounded_base,
)
from tests.support.tiny_adapters import adapter_configs, table_configs, with_names_of
from tests.support.tiny_models import save_tiny_model

ARCHITECTURES = ("llama", "qwen3", "gemma2", "gemma3", "granite", "lfm2", "qwen3_5")
"""qwen3 and the two Gemmas tie `lm_head` to the embedding. The Gemmas' embedding scales its output; Granite scales it
outside the embedding, and its logits."""
TIED = ("qwen3", "gemma2", "gemma3")


def make_oracle(architecture: str, folder: Path) -> Oracle:
    model = save_tiny_model(architecture, folder / "model")
    assert model.config.tie_word_embeddings == (architecture in TIED)
    configs = with_names_of(model, table_configs(is_tied=architecture in TIED))
    return oracle_of_saved(
        model, folder, lambda model: configs | {name: adapter_configs(model)[name] for name in ("rank1", "head8")}
    )


@pytest.fixture(scope="module")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> OracleOf:
    return cache(lambda architecture: make_oracle(architecture, tmp_path_factory.mktemp(architecture)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_own_tables_equal_peft_in_mixed_batches_and_after_eviction(oracle_of: OracleOf, architecture: str) -> None:
    oracle = oracle_of(architecture)
    _, wrong = run_all(oracle)
    assert not wrong
    assert_right_after_eviction(oracle)


def test_adapters_that_a_thread_loads_equal_peft(oracle_of: OracleOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, as large ones are: in mixed batches, and in an arena that fits one of them."""
    monkeypatch.setattr("loraserve.engine.adapters.memory.BACKGROUND_BYTES", 0)
    oracle = oracle_of("llama")
    _, wrong = run_all(oracle)
    assert not wrong
    assert_right_after_eviction(oracle)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_own_tables_equal_peft_on_the_reference_backend(oracle_of: OracleOf, architecture: str) -> None:
    _, wrong = run_all(oracle_of(architecture), backend="reference")
    assert not wrong


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_own_tables_in_bfloat16_are_about_as_accurate_as_peft(oracle_of: OracleOf, architecture: str) -> None:
    _, wrong = run_all(oracle_of(architecture).on("cpu", "bfloat16"))
    assert not wrong


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_own_tables_equal_peft_on_a_gpu(oracle_of: OracleOf, architecture: str) -> None:
    """Adapters are loaded while steps run."""
    _, wrong = run_all(oracle_of(architecture).on("cuda", "bfloat16"), max_num_seqs=8)
    assert not wrong


@pytest.mark.parametrize("method", ["look_up_own_tables", "_multiply_own_tables"])
def test_oracle_notices_the_base_tables(oracle_of: OracleOf, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForwardContext, method, lambda *_: None)
    _, wrong = run_all(oracle_of("qwen3"))
    table = "embedding" if method.startswith("look_up") else "head"
    assert {*wrong} == {f"own_{table}", "own_both", "own_tied"}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("quantization", ROUNDINGS)
def test_own_tables_are_not_quantized(oracle_of: OracleOf, architecture: str, quantization: Quantization) -> None:
    _, wrong = run_all(with_rounded_base(oracle_of(architecture), quantization), quantization=quantization)
    assert not wrong

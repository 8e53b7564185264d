"""Adapters with their own rows for some tokens (`trainable_token_indices`), against PEFT."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from loraserve_kernels.quantization import ROUNDINGS, Quantization
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.peft_oracle import (
    NUM_TOKENS,
    VOCAB_SIZE,
    Oracle,
    OracleOf,
    assert_right_after_eviction,
    run_all,
    with_rounded_base,
)
from tests.support.tiny_adapters import adapter_configs, reference_answers, save_adapters, token_configs, with_names_of
from tests.support.tiny_models import save_tiny_model

ARCHITECTURES = ("llama", "qwen3", "gemma2", "gemma3", "granite", "lfm2", "qwen3_5")
"""qwen3 and the two Gemmas tie `lm_head` to the embedding. The Gemmas' embedding scales its output; Granite scales it
outside the embedding."""
TWO_TABLES = "qwen3 with two tables"
TIED = ("qwen3", "gemma2", "gemma3", TWO_TABLES)


def make_oracle(architecture: str, folder: Path) -> Oracle:
    if architecture == TWO_TABLES:
        model = save_two_tables(folder / "model")
    else:
        model = save_tiny_model(architecture, folder / "model")
    is_tied = model.config.tie_word_embeddings
    assert is_tied == (architecture in TIED)
    configs = with_names_of(model, token_configs(is_tied=is_tied))
    adapters = save_adapters(model, folder / "adapters", configs | {"rank1": adapter_configs(model)["rank1"]})
    rng = random.Random(0)
    trained = [5, 250, 17, 9, 4, 77, 200, 100, 2, *range(21, 61, 4)]
    prompts: dict[str | None, list[int]] = {
        name: [rng.choice([rng.choice(trained), rng.randrange(256)]) for _ in range(length)]
        for name, length in zip([None, *adapters], (7, 40, 18, 25, 9, 33, 12), strict=True)
    }
    references = reference_answers(model, adapters, prompts, NUM_TOKENS, VOCAB_SIZE)
    return Oracle(folder, folder / "model", adapters, prompts, references)


def save_two_tables(folder: Path) -> PreTrainedModel:
    """Its config ties `lm_head` to the embedding, but the two differ in the file: transformers then reads both."""
    weights = save_tiny_model("qwen3", folder).state_dict()
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(7, 0)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert not torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)
    return model


@pytest.fixture(scope="module")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> OracleOf:
    return cache(lambda architecture: make_oracle(architecture, tmp_path_factory.mktemp(architecture)))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, TWO_TABLES])
def test_trained_tokens_equal_peft_in_mixed_batches_and_after_eviction(oracle_of: OracleOf, architecture: str) -> None:
    oracle = oracle_of(architecture)
    _, wrong = run_all(oracle)
    assert not wrong
    assert_right_after_eviction(oracle)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_trained_tokens_equal_peft_on_the_reference_backend(oracle_of: OracleOf, architecture: str) -> None:
    _, wrong = run_all(oracle_of(architecture), backend="reference")
    assert not wrong


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_trained_tokens_in_bfloat16_are_about_as_accurate_as_peft(oracle_of: OracleOf, architecture: str) -> None:
    _, wrong = run_all(oracle_of(architecture).on("cpu", "bfloat16"))
    assert not wrong


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_trained_tokens_equal_peft_on_a_gpu(oracle_of: OracleOf, architecture: str) -> None:
    """Adapters are loaded while steps run."""
    _, wrong = run_all(oracle_of(architecture).on("cuda", "bfloat16"), max_num_seqs=8)
    assert not wrong


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("quantization", ROUNDINGS)
def test_trained_rows_replace_quantized_rows(
    oracle_of: OracleOf, architecture: str, quantization: Quantization
) -> None:
    """Those of `lm_head`, and of an embedding tied to it."""
    _, wrong = run_all(with_rounded_base(oracle_of(architecture), quantization), quantization=quantization)
    assert not wrong


def test_oracle_notices_trained_rows_that_are_added_to_the_base_rows(
    oracle_of: OracleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.models.causal_model.subtract_base_rows", lambda *_: None)
    _, wrong = run_all(oracle_of("qwen3"))
    assert {*wrong} == {*token_configs(is_tied=True)}

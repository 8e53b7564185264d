"""Adapters on embeddings against PEFT: untied tables, tables tied to `lm_head`, and scaled ones."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loraserve_kernels.reference_backend import ReferenceBackend
from torch import Tensor
from transformers import PreTrainedModel

from loraserve.models.causal_model import CausalModel
from loraserve.models.forward import DirectForward
from tests.support.engines import run
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, run_all, run_one_by_one, wrong_answers
from tests.support.tiny_adapters import adapter_configs, embedding_configs, reference_answers, save_adapters
from tests.support.tiny_models import save_tiny_model, tiny_model

ARCHITECTURES = ("llama", "qwen3", "gemma2", "gemma3", "granite", "mixtral")
"""qwen3 and the two Gemmas tie `lm_head` to the embedding. The Gemmas' embedding scales its output; Granite scales it
outside the embedding."""


def make_oracle(architecture: str, folder: Path) -> Oracle:
    model = save_tiny_model(architecture, folder / "model")
    configs = embedding_configs() | {"rank1": adapter_configs(model)["rank1"]}
    adapters = save_adapters(model, folder / "adapters", configs)
    rng = random.Random(0)
    prompts: dict[str | None, list[int]] = {
        name: [rng.randrange(256) for _ in range(length)]
        for name, length in zip([None, *adapters], (7, 40, 18, 25), strict=True)
    }
    references = reference_answers(model, adapters, prompts, NUM_TOKENS, VOCAB_SIZE)
    return Oracle(folder, folder / "model", adapters, prompts, references)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_embedding_adapters_equal_peft_in_mixed_batches_and_after_eviction(architecture: str, tmp_path: Path) -> None:
    oracle = make_oracle(architecture, tmp_path)
    for settings in ({}, {"backend": "reference"}, {"max_num_batched_tokens": 16}):
        _, wrong = run_all(oracle, **settings)
        assert not wrong, settings
    engine, digests = oracle.engine(adapter_memory_bytes=oracle.largest_packed_bytes())
    assert not wrong_answers(oracle, run_one_by_one(engine, oracle.requests(digests)))
    assert engine.stats().num_adapter_evictions > 0


def test_embedding_adapters_in_bfloat16_are_about_as_accurate_as_peft(tmp_path: Path) -> None:
    for architecture in ("qwen3", "gemma3"):
        oracle = make_oracle(architecture, tmp_path / architecture).on("cpu", "bfloat16")
        _, wrong = run_all(oracle)
        assert not wrong


def test_steps_without_embedding_adapters_remain_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_oracle("llama", tmp_path)
    engine, digests = oracle.engine()
    forward = engine._runner._model._forward
    assert isinstance(forward, DirectForward)
    if engine.describe().backend != "cpu":
        pytest.skip("there are no compiled kernels, so no call for all of a step")
    assert forward._op is not None
    in_steps = DirectForward._in_steps
    names: list[str] = []
    monkeypatch.setattr(DirectForward, "_in_steps", lambda *args: names.append(name) or in_steps(*args))
    answers = {}
    for request in oracle.requests(digests):
        name = request.request_id
        answers |= run(engine, [request])
    assert {*names} == {"embedding5", "embedding2"}
    assert not wrong_answers(oracle, answers)


def adapted_modules(model: PreTrainedModel) -> list[str]:
    layout = CausalModel(model, ReferenceBackend()).layout
    return [module.name for group in layout.groups for module in group]


def test_an_embedding_that_does_more_than_look_up_rows_cannot_have_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    embedding = model.get_input_embeddings()
    original = embedding.forward
    monkeypatch.setattr(embedding, "forward", lambda ids: original(ids) + 1)
    causal_model = CausalModel(model, ReferenceBackend())
    assert causal_model.layout.embedding_modules == ("model.embed_tokens",)
    assert "model.embed_tokens" not in adapted_modules(model)
    causal_model.prepare(128, VOCAB_SIZE, lambda *_: None)


@pytest.mark.parametrize("others", [lambda ids: ids[:, 1:], lambda ids: ids + 1])
def test_an_embedding_called_with_other_ids_than_the_tokens_cannot_have_adapters(
    others: Callable[[Tensor], Tensor],
) -> None:
    """Which adapter a row is for would be unknown."""
    model = tiny_model("llama")
    assert "model.embed_tokens" in adapted_modules(model)
    embedding = model.get_input_embeddings()

    def read_more(*_: object) -> None:
        embedding(others(torch.arange(8)[None]))

    model.get_submodule("model.norm").register_forward_pre_hook(read_more)
    assert "model.embed_tokens" not in adapted_modules(model)


def test_a_model_without_a_known_embedding_still_has_adapters_on_its_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(model, "get_input_embeddings", lambda: None)
    assert adapted_modules(model)[0] == "model.layers.0.self_attn.q_proj"

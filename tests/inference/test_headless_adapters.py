"""Adapters trained for embeddings, on the body that `AutoModel` loads, against PEFT on that body plus the head."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loraserve_adapters.source import read_adapter
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from tests.inference.test_served_models import PARALLEL
from tests.support.engines import run
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, run_all, wrong_answers
from tests.support.tiny_adapters import reference_answer, save_adapters
from tests.support.tiny_models import CONFIGS, EXPERTS, multimodal_config, random_model, save_model

ATTENTION = ["q_proj", "v_proj"]
LLAMA: dict[str, dict[str, Any]] = {
    "plain": {"r": 3, "target_modules": ATTENTION},
    "no_task_type": {"r": 3, "target_modules": ATTENTION, "task_type": None},
    "all_linear": {"r": 2, "lora_alpha": 5, "target_modules": "all-linear"},
    "full_names": {"r": 4, "target_modules": ["layers.1.mlp.up_proj", "layers.0.self_attn.q_proj"]},
    "regex": {"r": 4, "target_modules": r"layers\.[01]\..*q_proj", "alpha_pattern": {"^layers.0.*": 32}},
    "layer": {"r": 4, "target_modules": ATTENTION, "layers_to_transform": [1], "layers_pattern": "layers"},
    "embedding": {"r": 5, "lora_alpha": 10, "target_modules": ["embed_tokens", "q_proj"], "use_rslora": True},
}
GPTJ: dict[str, dict[str, Any]] = {
    "plain": {"r": 3, "target_modules": [*ATTENTION, "fc_in"]},
    "regex": {"r": 4, "target_modules": r"h\.[01]\.attn\.(q|out)_proj", "rank_pattern": {"^h.0.*": 2}},
}
MODELS: dict[str, tuple[Callable[[], PreTrainedConfig], dict[str, dict[str, Any]]]] = {
    "llama": (CONFIGS["llama"], LLAMA),
    "qwen3": (CONFIGS["qwen3"], {name: LLAMA[name] for name in ("plain", "embedding")}),
    "mixtral": (
        EXPERTS["mixtral"],
        {
            "plain": LLAMA["plain"],
            "experts": {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]},
        },
    ),
    "gemma3_multimodal": (multimodal_config, {name: LLAMA[name] for name in ("plain", "no_task_type")}),
    "gptj": (PARALLEL["gptj"][0], GPTJ),
}
"""Qwen3's head is tied to its embedding; GPT-J's body is called `transformer`."""


class WithHead(nn.Module):
    """The body that `AutoModel` loads, with the head of the causal model."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, input_ids: Tensor, use_cache: bool, output_hidden_states: bool) -> SimpleNamespace:
        """Like a causal model's, but always with hidden states."""
        hidden = self.body(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        return SimpleNamespace(logits=self.head(hidden), hidden_states=(hidden,))


def load_body(folder: Path) -> PreTrainedModel:
    return AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def make_oracle(name: str, folder: Path) -> Oracle:
    make_config, options = MODELS[name]
    model = random_model(make_config())
    save_model(model, folder / "model")
    configs = {name: LoraConfig(**{"task_type": "FEATURE_EXTRACTION", **fields}) for name, fields in options.items()}
    adapters = save_adapters(load_body(folder / "model"), folder / "adapters", configs)
    rng = random.Random(0)
    prompts: dict[str | None, list[int]] = {
        name: [rng.randrange(256) for _ in range(rng.randrange(5, 40))] for name in [None, *adapters]
    }
    references = {}
    for adapter, prompt in prompts.items():
        body = load_body(folder / "model")
        peft_model = body if adapter is None else PeftModel.from_pretrained(body, str(adapters[adapter])).eval()
        whole = WithHead(peft_model, model.get_output_embeddings())
        references[adapter] = reference_answer(whole, prompt, NUM_TOKENS, VOCAB_SIZE)
    return Oracle(folder, folder / "model", adapters, prompts, references)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_answers_equal_those_of_the_head_on_pefts_hidden_states(name: str, tmp_path: Path) -> None:
    oracle = make_oracle(name, tmp_path)
    engine, wrong = run_all(oracle)
    assert not wrong
    layout = engine.describe().layout
    for folder in oracle.adapters.values():
        assert read_adapter(folder, layout).judged.is_headless


def test_oracle_notices_missing_adapters(tmp_path: Path) -> None:
    oracle = make_oracle("gptj", tmp_path)
    engine, digests = oracle.engine()
    answers = run(engine, oracle.requests(dict.fromkeys(digests)))
    assert wrong_answers(oracle, answers).keys() == oracle.adapters.keys()

"""Every adapter option we accept, all of them in one batch with the base model, against PEFT."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from loraserve_adapters.clean_files import clean_config
from loraserve_adapters.config import read_config
from loraserve_adapters.digest import canonical_config
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from loraserve.engine.engine import Engine
from tests.support.engines import run
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, run_all, wrong_answers
from tests.support.tiny_adapters import reference_answers, without_adapter
from tests.support.tiny_models import save_tiny_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_bias": True},
    "bias_on_head": {
        "r": 3,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": ["lm_head", "up_proj"],
        "lora_bias": True,
    },
    "regex": {"r": 5, "target_modules": r".*layers\.\d+\.(self_attn\.(q|o)_proj|mlp\.down_proj)"},
    "all_linear": {"r": 2, "lora_alpha": 5, "target_modules": "all-linear"},
    "excluded": {"r": 4, "target_modules": ATTENTION, "exclude_modules": ["k_proj", "layers.0.self_attn.o_proj"]},
    "excluded_regex": {"r": 4, "target_modules": "all-linear", "exclude_modules": r".*layers\.1\..*"},
    "layer": {"r": 6, "target_modules": ATTENTION, "layers_to_transform": 0},
    "layers_pattern": {
        "r": 6,
        "target_modules": ["gate_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "layers",
    },
    "rank_regex": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ATTENTION,
        "rank_pattern": {r"layers\.[0]\..*": 2, "o_proj": 12},
        "alpha_pattern": {"(q|v)_proj": 3},
    },
    "rslora": {"r": 9, "lora_alpha": 4, "use_rslora": True, "target_modules": ATTENTION},
    "full_names": {"r": 4, "target_modules": ["model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"]},
    "gaussian": {"r": 4, "target_modules": ["v_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"r": 4, "target_modules": ["v_proj"], "init_lora_weights": "orthogonal"},
    "uninitialised": {"r": 4, "target_modules": ["v_proj"], "init_lora_weights": False},
    "bfloat16": {"r": 4, "target_modules": ATTENTION},
    "float16": {"r": 4, "target_modules": ATTENTION},
    "float32": {"r": 4, "target_modules": ATTENTION},
    "all_biases": {"r": 4, "target_modules": ATTENTION, "bias": "all"},
    "dropout": {"r": 4, "target_modules": ["up_proj"], "lora_dropout": 0.5},
}
"""Name → fields of `LoraConfig`."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("options")
    model = save_tiny_model("llama", folder / "model")
    adapters: dict[str, Path] = {}
    for seed, (name, fields) in enumerate(OPTIONS.items()):
        with warnings.catch_warnings():
            # PEFT warns about biases that it cannot merge.
            warnings.simplefilter("ignore")
            peft_model = get_peft_model(model, LoraConfig(**fields))
        _randomise(peft_model, seed)
        peft_model.save_pretrained(str(folder / name))
        model = without_adapter(peft_model)
        if name in ("bfloat16", "float16"):
            _convert(folder / name, getattr(torch, name))
        adapters[name] = folder / name
    rng = random.Random(3)
    prompts: dict[str | None, list[int]] = {
        name: [rng.randrange(256) for _ in range(rng.randrange(4, 40))] for name in [None, *adapters]
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        references = reference_answers(model, adapters, prompts, NUM_TOKENS, VOCAB_SIZE)
    return Oracle(folder, folder / "model", adapters, prompts, references)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_adapters_with_every_option_equal_peft_in_one_batch(oracle: Oracle, backend: str) -> None:
    engine, wrong = run_all(oracle, backend=backend)
    assert not wrong
    assert engine.stats().num_adapter_loads == len(OPTIONS)


def test_biases_survive_eviction_and_compaction(oracle: Oracle) -> None:
    engine, digests = oracle.engine(adapter_memory_bytes=160_000)
    answers = run(engine, oracle.requests(digests, "first-"))
    answers |= run(engine, oracle.requests(digests, "second-"))
    assert not wrong_answers(oracle, answers, "first-")
    assert not wrong_answers(oracle, answers, "second-")
    assert engine.stats().num_adapter_evictions > 0


def test_oracle_notices_missing_biases(oracle: Oracle) -> None:
    engine, digests = oracle.engine()
    run(engine, oracle.requests(digests, "first-"))
    _table_of(engine).offset_bias.fill_(-1)
    answers = run(engine, oracle.requests(digests, "no-bias-"))
    assert set(wrong_answers(oracle, answers, "no-bias-")) == {"bias", "bias_on_head"}


def test_a_cleaned_config_has_the_same_canonical_form_and_loads_in_peft(oracle: Oracle) -> None:
    """Only the cleaned config of an upload is kept, so it must give the same digest."""
    for folder in oracle.adapters.values():
        config = read_config(folder)
        data = clean_config(config)
        (folder / "clean").mkdir(exist_ok=True)
        (folder / "clean" / "adapter_config.json").write_bytes(data)
        assert canonical_config(read_config(folder / "clean")) == canonical_config(config)
        fields = json.loads(data)
        assert LoraConfig(**fields).r == config.lora_rank


def _table_of(engine: Engine):
    assert engine._adapters is not None
    return engine._adapters.table


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                continue
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(values * 0.3)
            else:
                parameter.copy_(values * (0.7 if "lora_B" in name else 1.0) / parameter.shape[1] ** 0.5)


def _convert(folder: Path, dtype: torch.dtype) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path, {"format": "pt"})

"""Checkpoints of text with images whose class `AutoModelForCausalLM` lacks: adapters on their text equal PEFT's."""

from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig
from transformers import (
    AutoModelForMultimodalLM,
    Mistral3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from tests.support.peft_oracle import Oracle, oracle_of_saved, run_all
from tests.support.tiny_models import COMMON, random_model, save_model

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
QWEN_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
IMAGE = {"image_token_id": 259}


def in_grids(*sections: int) -> dict[str, object]:
    """Rotary embeddings with a position in each of three grids, which are the same for text."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mistral3": lambda: Mistral3Config(
        text_config=COMMON | {"model_type": "ministral3", "head_dim": 16},
        vision_config=TOWER | {"model_type": "pixtral", "patch_size": 14},
        image_token_index=259,
        tie_word_embeddings=False,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config=COMMON | in_grids(2, 3, 3),
        vision_config=QWEN_TOWER | {"patch_size": 14, "fullatt_block_indexes": [1]},
        tie_word_embeddings=False,
        **IMAGE,
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config=COMMON | in_grids(4, 4, 4) | {"head_dim": 24},
        vision_config=QWEN_TOWER | {"patch_size": 14, "deepstack_visual_indexes": [0, 1]},
        tie_word_embeddings=False,
        **IMAGE,
    ),
    "smolvlm": lambda: SmolVLMConfig(
        text_config=COMMON | {"model_type": "llama"},
        vision_config=TOWER | {"patch_size": 14},
        tie_word_embeddings=False,
        **IMAGE,
    ),
}


def configs(_model: object) -> dict[str, LoraConfig]:
    return {
        "all_linear": LoraConfig(r=4, target_modules="all-linear"),
        "some": LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]),
        "text": LoraConfig(r=3, use_dora=True, target_modules=r".*\.(language|text)_model\..*_proj"),
    }


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder: Path = tmp_path_factory.mktemp(request.param)
    model = random_model(FAMILIES[request.param](), model_class=AutoModelForMultimodalLM)
    save_model(model, folder / "model")
    return oracle_of_saved(model, folder, configs)


def test_adapters_equal_peft_on_text(oracle: Oracle) -> None:
    engine, wrong = run_all(oracle)
    assert not wrong
    assert engine.describe().architecture.endswith("ForConditionalGeneration")
    assert engine.describe().layout.unreached_linears


def test_prompts_in_chunks_equal_peft(oracle: Oracle) -> None:
    _, wrong = run_all(oracle, max_num_batched_tokens=11)
    assert not wrong

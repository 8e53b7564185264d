"""A base model with an image tower, whose text decoder is served: adapters on both equal PEFT's on text."""

import random
from pathlib import Path

import pytest
from loraserve_adapters.checks import Checks, CheckStatus
from loraserve_adapters.safetensors_file import WEIGHTS_NAME
from loraserve_adapters.source import check_adapter
from loraserve_kernels.reference_backend import ReferenceBackend
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models.causal_model import CausalModel
from tests.support.engines import make_engine
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, run_all
from tests.support.tiny_adapters import randomize, reference_answers, without_adapter
from tests.support.tiny_models import CONFIGS, EXPERTS, multimodal_config, random_model, save_model, tiny_model

TARGETS: dict[str, LoraConfig] = {
    "plain": LoraConfig(r=3, target_modules=["q_proj", "v_proj"]),
    "all_linear": LoraConfig(r=4, target_modules="all-linear"),
    "regex": LoraConfig(r=5, target_modules=r".*\.(k_proj|down_proj|fc1)", lora_alpha=20),
    "second_layer": LoraConfig(r=3, target_modules=["q_proj", "up_proj"], layers_to_transform=[1]),
    "text_only": LoraConfig(r=3, target_modules=["q_proj", "v_proj"], exclude_modules=".*vision_tower.*"),
}


def save_adapter(model: PreTrainedModel, config: LoraConfig, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Returns the model without the adapter."""
    peft_model = get_peft_model(model, config)
    randomize(peft_model, seed)
    peft_model.save_pretrained(str(folder))
    return without_adapter(peft_model)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("multimodal")
    model = random_model(multimodal_config())
    save_model(model, folder / "model")
    adapters: dict[str, Path] = {}
    for seed, (name, config) in enumerate(TARGETS.items()):
        adapters[name] = folder / name
        model = save_adapter(model, config, adapters[name], seed)
    rng = random.Random(0)
    prompts: dict[str | None, list[int]] = {
        name: [rng.randrange(256) for _ in range(rng.randrange(5, 40))] for name in [None, *adapters]
    }
    references = reference_answers(model, adapters, prompts, NUM_TOKENS, VOCAB_SIZE)
    return Oracle(folder, folder / "model", adapters, prompts, references)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_adapters_with_tensors_for_the_tower_equal_peft_on_text(oracle: Oracle, backend: str) -> None:
    _, wrong = run_all(oracle, backend=backend)
    assert not wrong


def test_warnings_count_unreached_linears_and_ignored_tensors(oracle: Oracle) -> None:
    layout = make_engine(oracle.model).describe().layout
    num_of_tower = {
        name: sum("vision_tower" in tensor for tensor in load_file(folder / WEIGHTS_NAME))
        for name, folder in oracle.adapters.items()
    }
    assert num_of_tower["plain"] == 8
    for name, folder in oracle.adapters.items():
        checks = Checks()
        assert check_adapter(folder, layout, checks) is not None
        warnings = {check.code: check.message for check in checks.listed() if check.status is CheckStatus.WARN}
        if name == "text_only":
            assert not warnings
            continue
        assert f"{num_of_tower[name] // 2} linear layers that text never reaches" in warnings["unreached_modules"]
        assert f"{num_of_tower[name]} tensors are ignored" in warnings["unused_tensors"]


@pytest.mark.parametrize("architecture", sorted(CONFIGS | EXPERTS))
def test_text_reaches_all_linears_of_text_models(architecture: str) -> None:
    """Including experts to which the recorded tokens were not routed."""
    assert CausalModel(tiny_model(architecture), ReferenceBackend()).layout.unreached_linears == ()


class Projection(nn.Module):
    """Never calls its linear, even if it is called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def unreached_beside_the_tower(model: PreTrainedModel) -> list[str]:
    tower = model.get_submodule("model.vision_tower")
    linears = {f"model.vision_tower.{name}" for name, module in tower.named_modules() if isinstance(module, nn.Linear)}
    unreached = CausalModel(model, ReferenceBackend()).layout.unreached_linears
    assert linears <= set(unreached)
    return [name for name in unreached if name not in linears]


def test_a_linear_outside_the_decoder_counts_as_reached_only_if_its_parent_is_called() -> None:
    model = random_model(multimodal_config())
    projection = model.model.projection = Projection()
    assert unreached_beside_the_tower(model) == ["model.projection.linear"]
    model.lm_head.register_forward_pre_hook(lambda _, args: (projection(args[0]),))
    assert unreached_beside_the_tower(model) == []


def test_a_linear_in_the_decoder_counts_as_reached_even_if_it_is_not_called() -> None:
    """Like an expert to which no recorded token was routed."""
    model = random_model(multimodal_config())
    decoder = model.model.language_model
    decoder.expert = Projection()
    assert unreached_beside_the_tower(model) == []
    # Also if the decoder itself is never called.
    decoder.layers.add_module("expert", Projection())
    model.get_decoder = lambda: decoder.layers
    assert "model.language_model.layers.expert.linear" not in unreached_beside_the_tower(model)


def test_a_linear_whose_weight_may_be_read_counts_as_reached() -> None:
    model = random_model(multimodal_config())
    model.model.scale = nn.Linear(64, 64, bias=False)
    assert unreached_beside_the_tower(model) == ["model.scale"]
    forward = model.model.forward

    def scaled(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.last_hidden_state *= model.model.scale.weight[0]
        return output

    model.model.forward = scaled
    assert unreached_beside_the_tower(model) == []

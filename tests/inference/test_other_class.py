"""Adapters trained on the class of a model that is not served, with an image tower or without, against PEFT on it."""

from pathlib import Path

import pytest
from loraserve_adapters.checks import Checks, CheckStatus
from loraserve_adapters.safetensors_file import WEIGHTS_NAME
from loraserve_adapters.source import check_adapter, read_adapter
from peft import LoraConfig
from safetensors.torch import load_file

from tests.support.engines import make_engine, run
from tests.support.peft_oracle import Oracle, oracle_of_saved, run_all, wrong_answers
from tests.support.tiny_models import model_with_tower, multimodal_config, random_model, save_model, text_only

UNSLOTH = (
    r"(?:.*?(?:vision|image|visual|patch|language|text).*?"
    r"(?:self_attn|attention|attn|linear_attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|in_proj_qkv|out_proj|qkv|proj|linear_fc1).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)
"""As Unsloth writes it, for the language model and the tower."""
UNSLOTH_TEXT = UNSLOTH.replace("vision|image|visual|patch|", "").replace("|qkv|proj|linear_fc1", "")
"""For the language model alone."""
WITH_TOWER = {
    "list": LoraConfig(r=3, target_modules=["q_proj", "in_proj_qkv", "linear_fc1"], layers_to_transform=[0, 1]),
    "all_linear": LoraConfig(r=4, target_modules="all-linear", use_rslora=True),
    "unsloth": LoraConfig(r=4, target_modules=UNSLOTH),
    "unsloth_text": LoraConfig(r=4, target_modules=UNSLOTH_TEXT),
    "head": LoraConfig(
        r=4,
        target_modules=["v_proj", "out_proj", "lm_head"],
        exclude_modules=["language_model.layers.1.self_attn.v_proj"],
        rank_pattern={r"^model.language_model.layers.2\..*": 7, "^model.layers.0.linear_attn.out_proj": 2},
    ),
    "tokens": LoraConfig(r=2, target_modules=["o_proj", "qkv"], trainable_token_indices=[5, 250, 17]),
    "own_tables": LoraConfig(
        r=2, use_dora=True, target_modules=["down_proj"], modules_to_save=["lm_head", "language_model.embed_tokens"]
    ),
}
TEXT_ONLY = {
    "list": LoraConfig(r=3, target_modules=["q_proj", "v_proj"]),
    "all_linear": LoraConfig(r=4, target_modules="all-linear"),
    "regex": LoraConfig(r=4, target_modules=r"model\.layers\.[02]\..*(q_proj|down_proj)", lora_alpha=20),
    "patterns": LoraConfig(
        r=4,
        target_modules=["o_proj", "lm_head"],
        rank_pattern={"^model.layers.1.*": 6, "^model.language_model.layers.0.*": 2},
        layers_to_transform=[0, 1],
        layers_pattern="layers",
    ),
    "embedding": LoraConfig(r=5, target_modules=["embed_tokens", "up_proj"]),
    "tokens": LoraConfig(r=2, target_modules=["o_proj"], trainable_token_indices={"model.embed_tokens": [5, 250, 17]}),
    "own_head": LoraConfig(
        r=2, target_modules=["down_proj"], modules_to_save=["lm_head"], ensure_weight_tying=True, use_dora=True
    ),
}


def oracle_with_tower(folder: Path, *, is_tied: bool) -> Oracle:
    model = model_with_tower(is_tied=is_tied)
    save_model(model, folder / "model")
    names = ("head", "tokens", "own_tables") if is_tied else WITH_TOWER
    return oracle_of_saved(model, folder, lambda _: {name: WITH_TOWER[name] for name in names})


@pytest.fixture(scope="module")
def of_tower(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return oracle_with_tower(tmp_path_factory.mktemp("tower"), is_tied=False)


@pytest.fixture(scope="module")
def of_tied_tower(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return oracle_with_tower(tmp_path_factory.mktemp("tied_tower"), is_tied=True)


@pytest.fixture(scope="module")
def of_text_only(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("text_only")
    model = random_model(multimodal_config())
    save_model(model, folder / "model")
    return oracle_of_saved(text_only(model), folder, lambda _: TEXT_ONLY)


@pytest.mark.parametrize("name", ["of_tower", "of_tied_tower", "of_text_only"])
def test_answers_equal_those_of_peft_on_the_class_that_was_trained(name: str, request: pytest.FixtureRequest) -> None:
    oracle: Oracle = request.getfixturevalue(name)
    engine, wrong = run_all(oracle)
    assert not wrong
    answers = run(engine, oracle.requests(dict.fromkeys(oracle.references)))
    assert wrong_answers(oracle, answers).keys() == oracle.adapters.keys()


@pytest.mark.parametrize("name", ["of_tower", "of_text_only"])
def test_modules_have_the_names_of_the_class_that_is_served(name: str, request: pytest.FixtureRequest) -> None:
    oracle: Oracle = request.getfixturevalue(name)
    layout = make_engine(oracle.model).describe().layout
    served = {module.name for group in layout.groups for module in group}
    assert any("language_model" in module for module in served) is (name == "of_text_only")
    for folder in oracle.adapters.values():
        source = read_adapter(folder, layout)
        assert {module.target.module.name for module in source.modules} <= served
        names = [entry.name for entry in source.judged.entries]
        assert any("language_model" in entry for entry in names) is (name == "of_tower")


def test_tensors_of_a_tower_that_the_layout_lacks_are_ignored_and_counted(of_tower: Oracle) -> None:
    layout = make_engine(of_tower.model).describe().layout
    num_of_tower = {
        name: sum("model.visual." in tensor for tensor in load_file(folder / WEIGHTS_NAME))
        for name, folder in of_tower.adapters.items()
    }
    assert {name for name, number in num_of_tower.items() if number} == {"list", "all_linear", "unsloth", "tokens"}
    for name, folder in of_tower.adapters.items():
        checks = Checks()
        assert check_adapter(folder, layout, checks) is not None
        warnings = {check.code: check.message for check in checks.listed() if check.status is CheckStatus.WARN}
        ignored = warnings.pop("unused_tensors", "0 tensors are ignored")
        assert f"{num_of_tower[name]} tensors are ignored" in ignored
        assert warnings.keys() == ({"unused_entry"} if name in ("list", "all_linear", "tokens") else set())

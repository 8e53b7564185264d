import json
from dataclasses import replace
from typing import Any

import pytest
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.config import parse_config
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.targets import Selection, Target, resolve_targets

from tests.unit.adapters.folders import TOWER_LINEARS, config_of, multimodal_layout, tiny_layout, with_embedding


def resolve(num_layers: int = 2, **fields: Any) -> tuple[Target, ...]:
    return select(tiny_layout(num_layers=num_layers), **fields).targets


def select(layout: BaseLayout, **fields: Any) -> Selection:
    return resolve_targets(parse_config(json.dumps(config_of(**fields)).encode()), layout)


def refusal(**fields: Any) -> AdapterError:
    with pytest.raises(AdapterError) as refused:
        resolve(**fields)
    return refused.value


def test_returns_targets_in_the_order_of_the_layout() -> None:
    names = [target.module.name for target in resolve(target_modules=["lm_head", "v_proj", "q_proj"])]
    assert names == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
        "lm_head",
    ]


def test_all_linear_excludes_the_embedding_and_lm_head() -> None:
    names = [
        target.module.name for target in select(with_embedding(tiny_layout()), target_modules="all-linear").targets
    ]
    assert len(names) == 14
    assert not {"lm_head", "model.embed_tokens"} & {*names}


def test_the_embedding_is_targeted_by_name_or_pattern_and_cannot_have_a_bias() -> None:
    layout = with_embedding(tiny_layout())
    for modules in (["embed_tokens", "q_proj"], r"model\.embed_tokens|.*q_proj"):
        names = [target.module.name for target in select(layout, target_modules=modules).targets]
        assert names == ["model.embed_tokens", *(f"model.layers.{layer}.self_attn.q_proj" for layer in range(2))]
    with pytest.raises(AdapterError, match="lora_bias: cannot be used with LoRA on an embedding") as refused:
        select(layout, target_modules=["embed_tokens"], lora_bias=True)
    assert refused.value.code == "invalid_field"


def test_an_activated_lora_cannot_target_the_embedding() -> None:
    layout = with_embedding(tiny_layout())
    with pytest.raises(
        AdapterError, match="alora_invocation_tokens: PEFT applies LoRA on an embedding to all tokens"
    ) as refused:
        select(layout, target_modules=["embed_tokens", "q_proj"], alora_invocation_tokens=[5])
    assert (refused.value.code, refused.value.key) == ("invalid_field", "alora_invocation_tokens")
    assert len(select(layout, target_modules=["q_proj", "lm_head"], alora_invocation_tokens=[5]).targets) == 3


def test_an_activated_lora_cannot_target_an_absorbed_linear() -> None:
    layout = tiny_layout()
    groups = tuple(
        tuple(replace(module, is_absorbed=module.name.endswith("v_proj")) for module in group)
        for group in layout.groups
    )
    layout = replace(layout, groups=groups)
    with pytest.raises(AdapterError, match=r"alora_invocation_tokens: cannot target .*v_proj") as refused:
        select(layout, target_modules=["v_proj", "q_proj"], alora_invocation_tokens=[5])
    assert (refused.value.code, refused.value.key) == ("unsupported_option", "alora_invocation_tokens")
    assert len(select(layout, target_modules=["q_proj"], alora_invocation_tokens=[5]).targets) == 2
    assert len(select(layout, target_modules=["v_proj"]).targets) == 2


def test_dora_cannot_target_the_embedding() -> None:
    layout = with_embedding(tiny_layout())
    with pytest.raises(AdapterError, match=r"use_dora: is supported for linear .* model.embed_tokens") as refused:
        select(layout, target_modules=["embed_tokens", "q_proj"], use_dora=True)
    assert (refused.value.code, refused.value.key) == ("unsupported_option", "use_dora")
    assert len(select(layout, target_modules=["q_proj", "lm_head"], use_dora=True).targets) == 3
    assert len(select(layout, target_modules="all-linear", use_dora=True).targets) == 14


def test_the_first_pattern_that_matches_wins() -> None:
    targets = resolve(rank_pattern={r"layers\.0\..*": 2, "q_proj": 6}, alpha_pattern={"q_proj": 12})
    assert [(target.lora_rank, target.scaling) for target in targets] == [(2, 6.0), (6, 2.0)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(r"self_attn\.q_proj", 2), ("self_attn.q_proj", 2), ("self.attn.q_proj", 2), ("self_attn\0q_proj", 4)],
)
def test_a_plain_pattern_matches_as_a_regular_expression(pattern: str, expected: int) -> None:
    assert [target.lora_rank for target in resolve(rank_pattern={pattern: 2})] == [expected, expected]


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        (["v_projj"], "unknown_module", "did you mean v_proj"),
        (["model.layers.7.self_attn.q_proj"], "unknown_module", "did you mean model.layers."),
        (["_proj"], "unknown_module", "no module"),
        ([""], "unknown_module", "no module"),
        ("", "unknown_module", "no module"),
        ("q_proj", "unknown_module", "no module"),
        (["embed_tokens"], "unsupported_module", "LoRA on this embedding is not supported: model.embed_tokens"),
        (["mlp"], "unsupported_module", "model.layers.0.mlp is not a linear layer"),
        (".*", "unsupported_module", "model is not a linear layer"),
        (r"(q_proj)\1", "unsupported_pattern", "target_modules"),
        ("(q_proj", "bad_pattern", "target_modules"),
    ],
)
def test_refuses_wrong_targets_by_name(target: object, code: str, text: str) -> None:
    error = refusal(target_modules=target)
    assert error.code == code
    assert text in error.message


@pytest.mark.parametrize(
    ("fields", "num_targets", "unreached"),
    [
        ({"target_modules": ["q_proj"]}, 2, TOWER_LINEARS[::2]),
        ({"target_modules": ".*q_proj"}, 2, TOWER_LINEARS[::2]),
        ({"target_modules": "all-linear"}, 14, TOWER_LINEARS),
        ({"target_modules": ["v_proj", "out_proj"]}, 2, TOWER_LINEARS[1::2]),
        ({"target_modules": ["q_proj"], "exclude_modules": ".*vision_tower.*"}, 2, ()),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 2]}, 1, TOWER_LINEARS[2::2]),
        ({"target_modules": ["language_model.layers.0.self_attn.q_proj"]}, 1, ()),
    ],
)
def test_linears_that_text_never_reaches_are_listed_separately(
    fields: dict[str, Any], num_targets: int, unreached: tuple[str, ...]
) -> None:
    selection = select(multimodal_layout(), **fields)
    assert len(selection.targets) == num_targets
    assert selection.unreached == unreached


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        (["conv", "q_proj"], "unsupported_module", "model.vision_tower.conv is not a linear layer"),
        (
            ["projection", "q_proj"],
            "unsupported_module",
            "model.projection is not a linear layer that can have an adapter",
        ),
        (["out_proj"], "unreached_modules", "no module that text reaches is targeted"),
        (["model.layers.0.self_attn.q_proj"], "unknown_module", "did you mean model.language_model.layers."),
    ],
)
def test_wrong_targets_are_refused_for_a_multimodal_base_too(target: list[str], code: str, text: str) -> None:
    with pytest.raises(AdapterError) as refused:
        select(multimodal_layout(), target_modules=target)
    assert refused.value.code == code
    assert text in refused.value.message


def test_an_entry_that_matches_nothing_is_ignored_if_another_matches() -> None:
    assert resolve(target_modules=["q_proj", "w_gate"]) == resolve(target_modules=["q_proj"])


def test_refuses_a_layer_that_the_base_does_not_have() -> None:
    assert "no layer 2" in refusal(layers_to_transform=[0, 2]).message


def test_refuses_a_config_that_excludes_all_its_targets() -> None:
    assert refusal(exclude_modules=["q_proj"]).code == "unknown_module"


def test_refuses_regular_expressions_in_layers_pattern() -> None:
    assert refusal(layers_to_transform=[0], layers_pattern="(a+)+").code == "unsupported_pattern"


def test_refuses_bad_rank_patterns_by_field() -> None:
    error = refusal(rank_pattern={"(?<=a)b": 4})
    assert error.code == "unsupported_pattern"
    assert "rank_pattern" in error.message


def test_hundreds_of_full_names_as_eva_writes_them_are_matched_exactly() -> None:
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(200)]
    ranks = {name: 1 + index % 7 for index, name in enumerate(names)}
    targets = resolve(num_layers=200, rank_pattern=ranks)
    assert {target.module.name: target.lora_rank for target in targets} == ranks


@pytest.mark.parametrize("pattern", [r"((.*a.*)*(.*b.*)*)*" * 20, r"(.|a)*" * 70])
def test_hostile_patterns_end_with_a_refusal_not_a_hang(pattern: str) -> None:
    table = {"#" + pattern + ".*" * number: 4 for number in range(22)}
    config = parse_config(json.dumps(config_of(target_modules="all-linear", rank_pattern=table)).encode())
    with pytest.raises(AdapterError) as refused:
        resolve_targets(config, tiny_layout(num_layers=100))
    assert refused.value.code == "pattern_too_complex"


def test_long_character_classes_are_cheap() -> None:
    table = {"#[" + "a-z" * 150 + "]*" + ".*" * number: 4 for number in range(22)}
    assert len(resolve(num_layers=50, target_modules="all-linear", rank_pattern=table)) == 350

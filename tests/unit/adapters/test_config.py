import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraserve_adapters import config as config_module
from loraserve_adapters.checks import Checks, CheckStatus
from loraserve_adapters.config import AdapterConfig, check_config, parse_config, read_config
from loraserve_adapters.digest import canonical_config
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import DEFAULT_LIMITS, AdapterLimits

from tests.unit.adapters.folders import config_of


def parse(**fields: Any) -> AdapterConfig:
    return parse_config(json.dumps(config_of(**fields)).encode())


def refusal(**fields: Any) -> AdapterError:
    with pytest.raises(AdapterError) as refused:
        parse(**fields)
    return refused.value


def test_fills_in_the_defaults_of_peft() -> None:
    config = parse_config(b'{"peft_type": "LORA", "target_modules": ["v_proj", "q_proj", "v_proj"]}')
    assert config == AdapterConfig(
        lora_rank=8,
        lora_alpha=8.0,
        use_rslora=False,
        target_modules=("q_proj", "v_proj"),
        exclude_modules=(),
        layers_to_transform=(),
        layers_pattern=(),
        rank_pattern=(),
        alpha_pattern=(),
    )


def test_knows_every_field_that_peft_writes() -> None:
    from peft import LoraConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict()
    known = config_module._HONOURED | config_module._WITHOUT_EFFECT.keys() | config_module._NEUTRAL.keys()
    assert {field.name for field in dataclasses.fields(LoraConfig)} <= known
    text = json.dumps({**written, "target_modules": list(written["target_modules"])})
    assert parse_config(text.encode()).lora_rank == 8


def test_keeps_the_order_of_patterns() -> None:
    config = parse(rank_pattern={"b": 2, "a": 3}, alpha_pattern={"z": 1, "y": 0.5})
    assert config.rank_pattern == (("b", 2), ("a", 3))
    assert config.alpha_pattern == (("z", 1.0), ("y", 0.5))


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_accepts_inits_that_leave_the_base_alone(value: object) -> None:
    parse(init_lora_weights=value, eva_config={"rho": 2.0})


def test_accepts_that_all_biases_are_trained_because_those_are_refused_as_tensors() -> None:
    assert canonical_config(parse(bias="all")) == canonical_config(parse(bias="none"))


@pytest.mark.parametrize("value", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "PiSSA"])
def test_refuses_inits_that_change_the_base(value: str) -> None:
    error = refusal(init_lora_weights=value)
    assert (error.code, error.key) == ("unsupported_option", "init_lora_weights")
    assert value in error.message
    assert "base weights" in error.message
    assert "path_initial_model_for_weight_conversion" in (error.remedy or "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "lora_only"),
        ("bias", "some"),
        ("bias", None),
        ("fan_in_fan_out", True),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("velora_config", {}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {}),
        ("arrow_config", {"top_k": 2}),
        ("layer_replication", [[0, 4]]),
        ("megatron_config", {"a": 1}),
        ("runtime_config", {"ephemeral_gpu_offload": True}),
        ("task_type", "TOKEN_CLS"),
        ("enable_lora", [True, False]),
        ("merge_weights", True),
        ("use_qalora", 0),
        ("init_lora_weights", "unheard_of"),
        ("init_lora_weights", 1),
    ],
)
def test_refuses_unsupported_options_by_name(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert (error.code, error.key, error.file) == ("unsupported_option", field, "adapter_config.json")
    assert field in error.message


@pytest.mark.parametrize("value", [None, "CAUSAL_LM", "FEATURE_EXTRACTION"])
def test_accepts_task_types_without_a_head_of_their_own(value: str | None) -> None:
    assert parse(task_type=value).task_type == value


@pytest.mark.parametrize("value", ["ADALORA", "IA3", "LOHA", "lora", None, 3, ["LORA"]])
def test_refuses_other_peft_types(value: object) -> None:
    assert refusal(peft_type=value).key == "peft_type"


@pytest.mark.parametrize("value", [1, True, 0, 0.0, "", "none", [0], [None], {"a": None}])
def test_refuses_unknown_fields_that_may_have_an_effect_by_name(value: object) -> None:
    error = refusal(lora_gamma=value)
    assert (error.code, error.key) == ("unknown_field", "lora_gamma")
    assert "lora_gamma" in error.message


def test_unknown_fields_without_effect_are_named_in_one_warning() -> None:
    """Every new PEFT release writes some such fields for every adapter."""
    checks = Checks()
    unknown = {"lora_gamma": None, "use_delta": False, "eps_config": {}, "zeta": []}
    config = check_config(json.dumps(config_of(**unknown)).encode(), DEFAULT_LIMITS, checks)
    assert config == parse()
    (warning,) = [check for check in checks.listed() if check.status is not CheckStatus.PASS]
    assert (warning.status, warning.name, warning.code) == (CheckStatus.WARN, "config.options", "ignored_field")
    assert warning.key == "lora_gamma, use_delta, eps_config, zeta"
    assert warning.key in warning.message
    assert warning.remedy
    assert "the other 4 fields are supported" in [check.message for check in checks.listed()]


def test_a_config_full_of_unknown_fields_has_one_short_ascii_warning() -> None:
    checks = Checks()
    check_config(json.dumps(config_of(**{f"é{i}": [] for i in range(2000)})).encode(), DEFAULT_LIMITS, checks)
    (warning,) = [check for check in checks.listed() if check.status is not CheckStatus.PASS]
    for text in (warning.message, warning.key):
        assert text is not None
        assert text.isascii()
        assert len(text) < 700


def test_an_ignored_field_does_not_hide_a_refused_one() -> None:
    assert refusal(lora_gamma=None, use_qalora=True).key == "use_qalora"


@pytest.mark.parametrize(
    ("auto_mapping", "is_told"),
    [
        (None, False),
        ({"base_model_class": "LlamaModel", "parent_library": "transformers.models.llama.modeling_llama"}, False),
        ({"base_model_class": "LlamaBiModel", "parent_library": "llm2vec.models.bidirectional_llama"}, True),
        ({"base_model_class": "LlamaModel", "parent_library": "transformers_modules.llama"}, True),
        ({"parent_library": 3}, False),
        ({}, False),
    ],
)
def test_a_base_class_that_may_compute_differently_is_a_warning(auto_mapping: object, is_told: bool) -> None:
    checks = Checks()
    config = config_of(auto_mapping=auto_mapping)
    assert check_config(json.dumps(config).encode(), DEFAULT_LIMITS, checks) == parse()
    told = [(check.name, check.code) for check in checks.listed() if check.status is not CheckStatus.PASS]
    assert told == ([("config.class", "other_class")] if is_told else [])


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("r", 0, "invalid_field"),
        ("r", -4, "invalid_field"),
        ("r", 4.0, "invalid_field"),
        ("r", True, "invalid_field"),
        ("r", "4", "invalid_field"),
        ("r", 513, "rank_too_large"),
        ("r", 10**400, "rank_too_large"),
        ("lora_alpha", "8", "invalid_field"),
        ("lora_alpha", None, "invalid_field"),
        ("lora_alpha", True, "invalid_field"),
        ("lora_alpha", 1e300, "invalid_field"),
        ("lora_alpha", 10**400, "invalid_field"),
        ("use_rslora", 1, "invalid_field"),
        ("lora_bias", 1, "invalid_field"),
        ("use_dora", 0, "invalid_field"),
        ("use_dora", "yes", "invalid_field"),
        ("use_dora", [True], "invalid_field"),
        ("alora_invocation_tokens", [], "invalid_field"),
        ("alora_invocation_tokens", 7, "invalid_field"),
        ("alora_invocation_tokens", "<role>", "invalid_field"),
        ("alora_invocation_tokens", False, "invalid_field"),
        ("alora_invocation_tokens", [True], "invalid_field"),
        ("alora_invocation_tokens", [1.0], "invalid_field"),
        ("alora_invocation_tokens", [-1], "invalid_field"),
        ("alora_invocation_tokens", [1 << 31], "invalid_field"),
        ("alora_invocation_tokens", [1] * 65, "too_large"),
        ("target_modules", None, "invalid_field"),
        ("target_modules", [], "invalid_field"),
        ("target_modules", [1], "invalid_field"),
        ("target_modules", {"q_proj": 1}, "invalid_field"),
        ("target_modules", "a" * 513, "too_large"),
        ("target_modules", ["a" * 513], "too_large"),
        ("target_parameters", "experts.down_proj", "invalid_field"),
        ("target_parameters", {"experts.down_proj": 1}, "invalid_field"),
        ("target_parameters", [1], "invalid_field"),
        ("target_parameters", 1, "invalid_field"),
        ("target_parameters", True, "invalid_field"),
        ("target_parameters", False, "invalid_field"),
        ("target_parameters", 0, "invalid_field"),
        ("target_parameters", "", "invalid_field"),
        ("target_parameters", {}, "invalid_field"),
        ("target_parameters", ["a" * 513], "too_large"),
        ("exclude_modules", 1, "invalid_field"),
        ("layers_to_transform", "0", "invalid_field"),
        ("layers_to_transform", [0.5], "invalid_field"),
        ("layers_to_transform", [-1], "invalid_field"),
        ("layers_to_transform", True, "invalid_field"),
        ("layers_pattern", "layers", "invalid_field"),
        ("layers_pattern", 1, "invalid_field"),
        ("rank_pattern", [], "invalid_field"),
        ("rank_pattern", {"a": 0}, "invalid_field"),
        ("rank_pattern", {"a": 1024}, "rank_too_large"),
        ("rank_pattern", {"a" * 513: 4}, "too_large"),
        ("rank_pattern", {f"m{number}": 4 for number in range(2049)}, "too_large"),
        ("alpha_pattern", {"a": "b"}, "invalid_field"),
        ("lora_dropout", "0.1", "invalid_field"),
        ("auto_mapping", "os", "invalid_field"),
        ("base_model_name_or_path", 3, "invalid_field"),
    ],
)
def test_refuses_values_out_of_range(field: str, value: object, code: str) -> None:
    error = refusal(**{field: value})
    assert error.code == code
    assert error.key is not None
    assert error.key.startswith(field)
    assert len(error.message) < 500


@pytest.mark.parametrize("field", ["layers_to_transform", "layers_pattern"])
def test_refuses_layer_selection_with_a_target_pattern_as_peft_does(field: str) -> None:
    value = [0] if field == "layers_to_transform" else "layers"
    assert refusal(target_modules=".*q_proj", **{field: value}).code == "invalid_field"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), ([5], (5,)), ([9, 9, 2], (9, 9, 2)), ([1] * 64, (1,) * 64)]
)
def test_invocation_tokens_keep_their_order_and_repeats(value: object, expected: tuple[int, ...]) -> None:
    assert parse(alora_invocation_tokens=value, task_type="CAUSAL_LM").invocation_token_ids == expected
    assert parse(alora_invocation_tokens=value, task_type=None).invocation_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"task_type": "FEATURE_EXTRACTION"}, "FEATURE_EXTRACTION"),
    ],
)
def test_refuses_an_invocation_that_peft_would_not_apply(fields: dict[str, object], named: str) -> None:
    error = refusal(alora_invocation_tokens=[5], **fields)
    assert (error.code, error.key) == ("invalid_field", "alora_invocation_tokens")
    assert named in error.message


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ()), ([], ()), (["experts.down_proj", "a.b", "a.b"], ("a.b", "experts.down_proj"))],
)
def test_target_parameters_are_sorted_and_deduplicated(value: object, expected: tuple[str, ...]) -> None:
    assert parse(target_parameters=value).target_parameters == expected


@pytest.mark.parametrize("value", [None, []])
def test_target_modules_may_be_empty_if_parameters_are_targeted(value: object) -> None:
    config = parse(target_modules=value, target_parameters=["experts.down_proj"])
    assert (config.target_modules, config.target_parameters) == ((), ("experts.down_proj",))
    assert refusal(target_modules=value, target_parameters=[]).key == "target_modules"


def test_refuses_lora_bias_with_target_parameters_as_peft_does() -> None:
    error = refusal(target_parameters=["experts.down_proj"], lora_bias=True)
    assert (error.code, error.key) == ("invalid_field", "target_parameters")
    assert parse(target_parameters=[], lora_bias=True).lora_bias


@pytest.mark.parametrize(("value", "expected"), [(True, True), (False, False), (None, False)])
def test_use_dora_may_be_true_false_or_null(value: bool | None, expected: bool) -> None:
    checks = Checks()
    config = check_config(json.dumps(config_of(use_dora=value)).encode(), DEFAULT_LIMITS, checks)
    assert config is not None
    assert (config.use_dora, parse().use_dora) == (expected, False)
    (values,) = [check.message for check in checks.listed() if check.name == "config.values"]
    assert values == "rank 4, alpha 8" + (", DoRA" if expected else "")


@pytest.mark.parametrize(
    ("field", "value", "nothing"),
    [
        ("lora_bias", True, False),
        ("alora_invocation_tokens", [5], None),
        ("target_parameters", ["experts.down_proj"], []),
    ],
)
def test_refuses_dora_with_options_that_peft_refuses_with_it(field: str, value: object, nothing: object) -> None:
    error = refusal(use_dora=True, **{field: value})
    assert (error.code, error.key, error.file) == ("invalid_field", "use_dora", "adapter_config.json")
    assert f"cannot be combined with {field}" in error.message
    assert parse(use_dora=True, **{field: nothing}).use_dora
    assert not parse(use_dora=False, **{field: value}).use_dora


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b'{"peft_type": "LORA"',
        b'{"r": NaN}',
        b'{"r": Infinity}',
        b"\xff\xfe{}",
        b'\xef\xbb\xbf{"peft_type": "LORA"}',
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"[" * 33 + b"]" * 33 + b"}",
        b'{"a": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_refuses_configs_that_are_not_plain_json(data: bytes) -> None:
    with pytest.raises(AdapterError) as refused:
        parse_config(data)
    assert refused.value.code == "bad_json"


def test_brackets_inside_strings_do_not_count_as_nesting() -> None:
    text = json.dumps(config_of(base_model_name_or_path='[{\\"' * 50))
    assert parse_config(text.encode()).base_model_name == '[{\\"' * 50


def test_refuses_duplicate_keys_by_name() -> None:
    with pytest.raises(AdapterError, match='"r" occurs twice') as refused:
        parse_config(b'{"peft_type": "LORA", "r": 4, "r": 8}')
    assert refused.value.code == "duplicate_key"
    with pytest.raises(AdapterError, match='"q" occurs twice'):
        parse_config(b'{"peft_type": "LORA", "rank_pattern": {"q": 4, "q": 8}}')


def test_refuses_a_config_over_256_kib(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b" " * (256 * 1024) + b"{}")
    with pytest.raises(AdapterError, match="262144") as refused:
        read_config(tmp_path)
    assert refused.value.code == "too_large"


def test_refuses_files_that_are_not_regular_without_blocking(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    with pytest.raises(AdapterError) as refused:
        read_config(tmp_path)
    assert refused.value.code == "missing_file"
    os.mkfifo(path)
    with pytest.raises(AdapterError) as refused:
        read_config(tmp_path)
    assert refused.value.code == "not_a_regular_file"
    path.unlink()
    path.mkdir()
    with pytest.raises(AdapterError) as refused:
        read_config(tmp_path)
    assert refused.value.code == "not_a_regular_file"
    path.rmdir()
    path.symlink_to("/dev/zero")
    for follow_symlinks in (False, True):
        with pytest.raises(AdapterError) as refused:
            read_config(tmp_path, AdapterLimits(follow_symlinks=follow_symlinks))
        assert refused.value.code == "not_a_regular_file"
    with pytest.raises(AdapterError) as refused:
        read_config(tmp_path / "missing")
    assert refused.value.code == "missing_file"


def test_follows_symlinks_only_if_the_caller_allows_it(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text(json.dumps(config_of()))
    (tmp_path / "adapter_config.json").symlink_to("blob")
    with pytest.raises(AdapterError, match="symbolic link"):
        read_config(tmp_path)
    assert read_config(tmp_path, AdapterLimits(follow_symlinks=True)).lora_rank == 4


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text('{}[]":,\\ peft_yLORA0', max_size=80).map(str.encode))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    try:
        parse_config(data)
    except AdapterError as error:
        error.message.encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
known_fields = sorted(config_module._HONOURED | config_module._WITHOUT_EFFECT.keys() | config_module._NEUTRAL.keys())


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(known_fields), json_values, max_size=5))
def test_any_values_are_parsed_or_refused(fields: dict[str, Any]) -> None:
    try:
        parse_config(json.dumps({**config_of(), **fields}).encode())
    except AdapterError as error:
        assert_names_the_config(error)


def assert_names_the_config(error: AdapterError) -> None:
    error.message.encode()
    assert error.file == "adapter_config.json"

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from loraserve_adapters.checks import MAX_FAILURES_SHOWN, Checks, CheckStatus
from loraserve_adapters.clean_files import clean_config
from loraserve_adapters.config import parse_config
from loraserve_adapters.digest import adapter_digest
from loraserve_adapters.errors import AdapterError

from loraserve.control.ingest.report import Report, validate_adapter
from tests.unit.adapters.folders import config_of, lora_key, lora_tensors, tiny_layout, with_magnitudes, write_folder

LAYOUT = tiny_layout()
TEMPLATE = "{{ messages }}"


def report_on(folder: Path, config: dict, tensors: dict) -> Report:
    return validate_adapter(write_folder(folder, config, tensors), LAYOUT, TEMPLATE, base_names=["org/tiny"])


def test_failures_come_first_then_warnings_then_passed_checks() -> None:
    checks = Checks()
    checks.passed("a", "fine")
    checks.warn("b", AdapterError("unused_entry", "odd"))
    checks.fail("c", AdapterError("not_finite", "wrong", found="NaN", expected="finite values"))
    listed = checks.listed()
    assert [check.name for check in listed] == ["c", "b", "a"]
    assert (listed[0].found, listed[0].expected) == ("NaN", "finite values")
    assert listed[0].remedy is not None
    with pytest.raises(AdapterError, match="wrong"):
        checks.raise_first()


def test_repeated_failures_above_the_maximum_are_counted_not_listed() -> None:
    checks = Checks()
    for number in range(MAX_FAILURES_SHOWN + 7):
        checks.fail("c", AdapterError("not_finite", f"wrong {number}"))
    listed = checks.listed()
    assert len(listed) == MAX_FAILURES_SHOWN + 1
    assert listed[-1].message == "7 more failures of this kind"
    assert listed[-1].status is CheckStatus.FAIL


def test_a_good_adapter_passes_every_check(tmp_path: Path) -> None:
    config = config_of(base_model_name_or_path="/models/Tiny/")
    report = report_on(tmp_path, config, lora_tensors(LAYOUT, ["q_proj"]))
    assert {check.status for check in report.checks} == {CheckStatus.PASS}
    assert report.accepted
    assert report.summary == f"all {len(report.checks)} checks passed"


def test_a_chat_template_in_the_folder_that_is_not_the_bases_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0] }}")
    report = report_on(tmp_path, config_of(), lora_tensors(LAYOUT, ["q_proj"]))
    assert report.accepted
    (warning,) = [check for check in report.checks if check.status is CheckStatus.WARN]
    assert (warning.code, warning.file) == ("other_chat_template", "chat_template.jinja")
    assert "chats are rendered with the base model's" in warning.message
    assert "--chat-template" in (warning.remedy or "")
    assert report.summary == f"{len(report.checks) - 1} checks passed, 1 warning"


def test_a_snapshot_of_symlinks_is_accepted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "blobs", config_of(), lora_tensors(LAYOUT, ["q_proj"]))
    (tmp_path / "snapshot").mkdir()
    for path in folder.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert validate_adapter(tmp_path / "snapshot", LAYOUT, None).accepted


def test_reports_missing_unexpected_and_misshapen_tensors_together(tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, ["q_proj"], rank=3) | lora_tensors(LAYOUT, ["0.mlp.up_proj"])
    tensors.pop(lora_key("model.layers.1.self_attn.q_proj", "B"))
    report = report_on(tmp_path, config_of(), tensors)
    assert Counter(report.codes) == {"missing_tensor": 1, "rank_mismatch": 2, "unexpected_tensor": 2}
    assert "(and 4 more)" in report.summary


def test_warns_about_another_base_an_unused_entry_and_no_effect(tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, ["q_proj"])
    for name, (dtype, shape, raw) in tensors.items():
        if ".lora_B." in name:
            tensors[name] = (dtype, shape, bytes(len(raw)))
    config = config_of(base_model_name_or_path="meta/other", target_modules=["q_proj", "W_pack"])
    report = report_on(tmp_path, config, tensors)
    assert report.accepted
    warnings = [(check.code, check.key) for check in report.checks if check.status is CheckStatus.WARN]
    assert warnings == [
        ("other_base_model", "base_model_name_or_path"),
        ("unused_entry", "target_modules"),
        ("no_effect", None),
    ]
    assert report.summary == f"{len(report.checks) - 3} checks passed, 3 warnings"


@pytest.mark.parametrize("author", ["org/tiny", "/secret/place/tiny", "my-model"])
def test_any_name_of_the_base_is_accepted_and_only_the_first_one_shown(tmp_path: Path, author: str) -> None:
    folder = write_folder(tmp_path, config_of(base_model_name_or_path=author), lora_tensors(LAYOUT, ["q_proj"]))
    report = validate_adapter(folder, LAYOUT, TEMPLATE, base_names=["my-model", "/secret/place/tiny"])
    (check,) = (check for check in report.checks if check.name == "config.base_model")
    assert check.status is CheckStatus.PASS
    assert check.expected == "my-model"


def test_only_the_first_name_of_the_base_is_shown_to_the_author_of_an_adapter_for_another(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_of(base_model_name_or_path="a/b"), lora_tensors(LAYOUT, ["q_proj"]))
    report = validate_adapter(folder, LAYOUT, TEMPLATE, base_names=["my-model", "/secret/place/tiny"])
    (check,) = (check for check in report.checks if check.code == "other_base_model")
    assert "my-model" in check.message
    assert "secret" not in f"{check.message} {check.expected}"


def test_dora_has_an_effect_even_if_every_b_is_zero(tmp_path: Path) -> None:
    tensors = with_magnitudes(lora_tensors(LAYOUT, ["q_proj"]))
    for name, (dtype, shape, raw) in tensors.items():
        if ".lora_B." in name:
            tensors[name] = (dtype, shape, bytes(len(raw)))
    report = report_on(tmp_path, config_of(use_dora=True), tensors)
    assert {check.status for check in report.checks} == {CheckStatus.PASS}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_rslora": True, "lora_bias": True, "target_modules": "all-linear"},
        {"target_modules": r".*\.(q|v)_proj", "exclude_modules": "lm_head", "rank_pattern": {"b": 2, "a": 3}},
        {"layers_to_transform": [1, 0], "layers_pattern": "layers", "alpha_pattern": {"q_proj": 0.1}},
        {"layers_to_transform": 1, "exclude_modules": ["k_proj"], "lora_alpha": 1 / 3},
        {"layers_to_transform": [], "layers_pattern": "layers"},
        {"alora_invocation_tokens": [7, 5, 7], "task_type": "CAUSAL_LM"},
        {"use_dora": True, "use_rslora": True},
    ],
)
def test_the_clean_config_is_equivalent_to_the_original(fields: dict) -> None:
    config = parse_config(json.dumps(config_of(**fields, base_model_name_or_path="mine", lora_dropout=0.1)).encode())
    clean = parse_config(clean_config(config))
    assert adapter_digest(clean, []) == adapter_digest(config, [])
    assert clean == replace(config, base_model_name=None)


def test_the_digest_includes_the_invocation_only_if_set() -> None:
    values = [None, [5], [5, 6], [6, 5], [56]]
    configs = [parse_config(json.dumps(config_of(alora_invocation_tokens=value)).encode()) for value in values]
    assert adapter_digest(parse_config(json.dumps(config_of()).encode()), []) == adapter_digest(configs[0], [])
    assert len({adapter_digest(config, []) for config in configs}) == len(values)


def test_the_digest_includes_lora_bias_only_if_set() -> None:
    plain = parse_config(json.dumps(config_of()).encode())
    without = parse_config(json.dumps(config_of(lora_bias=False)).encode())
    biased = parse_config(json.dumps(config_of(lora_bias=True)).encode())
    assert adapter_digest(plain, []) == adapter_digest(without, []) != adapter_digest(biased, [])


def test_the_digest_includes_use_dora_only_if_set() -> None:
    plain = parse_config(json.dumps(config_of()).encode())
    without = parse_config(json.dumps(config_of(use_dora=False)).encode())
    dora = parse_config(json.dumps(config_of(use_dora=True)).encode())
    assert adapter_digest(plain, []) == adapter_digest(without, []) != adapter_digest(dora, [])

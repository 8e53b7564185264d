"""`chat_template` of adapter_config.json: the name of one of the operator's templates."""

from pathlib import Path

import pytest
from loraserve_adapters.checks import Checks, CheckStatus
from loraserve_adapters.clean_files import clean_config
from loraserve_adapters.config import AdapterConfig, parse_config, read_config
from loraserve_adapters.digest import canonical_config
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.judge import judge_config
from loraserve_adapters.rules import AdapterRules

from tests.unit.adapters.folders import config_of, lora_tensors, tiny_layout, write_folder


def config(folder: Path, **fields: object) -> AdapterConfig:
    return read_config(write_folder(folder, config_of(**fields), lora_tensors(tiny_layout(), ["q_proj"])))


def refused(folder: Path, **fields: object) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        config(folder, **fields)
    return caught.value


def known(folder: Path, *names: str) -> list[str | None]:
    """Codes of the failed checks on a server that has these templates."""
    checks = Checks()
    data = (folder / "adapter_config.json").read_bytes()
    judge_config(data, checks, AdapterRules(chat_templates=names))
    return [check.code for check in checks.listed() if check.status == CheckStatus.FAIL]


@pytest.mark.parametrize("name", ["chatml", "Llama-3.1_v2", "7b", "x" * 64])
def test_the_template_name_is_part_of_the_content(name: str, tmp_path: Path) -> None:
    named, plain = config(tmp_path / "named", chat_template=name), config(tmp_path / "plain")
    assert (named.chat_template, plain.chat_template) == (name, None)
    assert canonical_config(named) != canonical_config(plain)
    assert canonical_config(plain) == canonical_config(config(tmp_path / "null", chat_template=None))
    assert parse_config(clean_config(named)).chat_template == name
    assert b"chat_template" not in clean_config(plain)


@pytest.mark.parametrize(
    "value", ["", "x" * 65, "-a", "a b", "../a", "{{ messages }}", 3, ["chatml"], {"a": "b"}, True]
)
def test_values_that_are_not_template_names_are_refused(value: object, tmp_path: Path) -> None:
    error = refused(tmp_path, chat_template=value)
    assert (error.code, error.key) == ("invalid_field", "chat_template")
    assert "1 to 64 letters, digits" in error.message


@pytest.mark.parametrize(
    "fields", [{"task_type": "FEATURE_EXTRACTION"}, {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}]
)
def test_adapters_that_cannot_chat_may_not_name_a_template(fields: dict[str, object], tmp_path: Path) -> None:
    error = refused(tmp_path, chat_template="chatml", **fields)
    assert (error.code, error.key) == ("invalid_field", "chat_template")
    assert str(fields["task_type"]) in error.message


def test_a_template_that_the_server_does_not_have_is_refused(tmp_path: Path) -> None:
    config(tmp_path / "named", chat_template="chatml")
    config(tmp_path / "plain")
    assert known(tmp_path / "named", "llama", "chatml") == []
    assert known(tmp_path / "named", "llama", "ChatML") == known(tmp_path / "named") == ["unknown_chat_template"]
    assert known(tmp_path / "plain") == []

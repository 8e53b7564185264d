"""The chat template in an adapter's folder, found as transformers finds it."""

import json
from pathlib import Path

import pytest
from loraserve_adapters.chat_template import MAX_BYTES, other_chat_template

from tests.support.tiny_models import tiny_tokenizer

SERVED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def config_with(template: object) -> str:
    return json.dumps({"eos_token": "</s>", "chat_template": template})


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"chat_template.jinja": SERVED}, None),
        ({"chat_template.jinja": SERVED + "\n"}, None),
        ({"chat_template.jinja": SERVED + "!"}, "chat_template.jinja"),
        ({"tokenizer_config.json": config_with(SERVED)}, None),
        ({"tokenizer_config.json": config_with("other")}, "tokenizer_config.json"),
        ({"tokenizer_config.json": config_with([{"name": "default", "template": SERVED}])}, None),
        ({"tokenizer_config.json": config_with([{"name": "default", "template": "other"}])}, "tokenizer_config.json"),
        ({"tokenizer_config.json": config_with([{"name": "tool_use", "template": "other"}])}, None),
        # chat_template.jinja takes precedence.
        ({"chat_template.jinja": SERVED, "tokenizer_config.json": config_with("other")}, None),
        ({"chat_template.jinja": "other", "tokenizer_config.json": config_with(SERVED)}, "chat_template.jinja"),
    ],
)
def test_names_the_file_with_a_different_template(files: dict[str, str], expected: str | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert other_chat_template(tmp_path, SERVED) == expected


@pytest.mark.parametrize("name", ["chatml", None])
def test_templates_in_the_folder_are_ignored_if_the_config_names_one(name: str | None, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("other")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "chat_template": name}))
    assert other_chat_template(tmp_path, SERVED) == (None if name else "chat_template.jinja")


def test_any_template_differs_from_a_base_without_one(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(SERVED)
    assert other_chat_template(tmp_path, None) == "chat_template.jinja"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"chat_template": 3}',
        b'{"chat_template": [3, {}, {"name": []}]}',
        b"[" * 200_000,
    ],
)
def test_an_unreadable_tokenizer_config_has_no_template(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(data)
    assert other_chat_template(tmp_path, SERVED) is None


def test_folders_and_huge_files_are_not_read_as_templates(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").mkdir()
    with open(tmp_path / "tokenizer_config.json", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert other_chat_template(tmp_path, SERVED) is None


def test_the_bases_template_as_a_tokenizer_saves_it_does_not_differ(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert other_chat_template(tmp_path, tokenizer.chat_template) is None
    assert other_chat_template(tmp_path, SERVED) is not None

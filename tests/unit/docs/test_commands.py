"""Every `loraserve …` in a document or a deploy file can be typed as it stands: command, flags, values, arguments."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from loraserve.cli.main import COMMANDS, main
from loraserve.cli.serve.command import serve, spread_values

ROOT = Path(__file__).parents[3]
FILES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", *filter(Path.is_file, ROOT.glob("deploy/**/*"))])
COMMAND = re.compile(rf"\bloraserve ((?:{'|'.join(COMMANDS)})\b[^\n`]*)")
ENDS = ("&&", "||", "|", ">", "2>", ";", "#")
LEAST = 60
"""Fewer commands would mean that the search is broken."""


def commands_of(text: str) -> Iterator[list[str]]:
    """As words, without `loraserve`."""
    for match in COMMAND.finditer(text.replace("\\\n", " ")):
        words = shlex.split(match[1].strip(), comments=True)
        end = next((index for index, word in enumerate(words) if word in ENDS), len(words))
        # For running text, such as "then `loraserve serve`,".
        yield [word.rstrip(",") for word in words[:end]]


def found() -> list[tuple[str, list[str]]]:
    return [(path.name, words) for path in FILES for words in commands_of(path.read_text())]


def check(words: list[str]) -> None:
    """Raises `click.UsageError`."""
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group) and words:
        name, words = words[0], words[1:]
        named = command.get_command(context, name)
        if named is None:
            raise click.UsageError(f"no command {name!r}")
        command, context = named, click.Context(named, context, name)
    if command.name == "serve":
        words = spread_values(words)
    try:
        values, left, _ = command.make_parser(context).parse_args([*words])
    except click.BadOptionUsage as error:
        if error.option_name != words[-1]:
            raise
        # The text mentions only the option's name.
        values, left, _ = command.make_parser(context).parse_args(words[:-1])
    if left:
        raise click.UsageError(f"too many arguments: {left}")
    for parameter in command.params:
        value = values.get(parameter.name or "")
        is_path = isinstance(parameter.type, click.Path)
        if not is_path and isinstance(value, str):
            parameter.type_cast_value(context, value)


@pytest.mark.parametrize(
    ("file", "words"), found(), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_a_documented_command_is_valid_as_written(file: str, words: list[str]) -> None:
    check(words)


def test_commands_are_found_in_all_documents_and_deploy_files() -> None:
    names = [name for name, _ in found()]
    assert len(names) >= LEAST
    assert {"README.md", "adapters.md", "tenancy.md", "operations.md", "compose.yaml", "loraserve.service"} <= {*names}


def test_the_documented_config_file_is_valid(tmp_path: Path) -> None:
    (table,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "operations.md").read_text(), re.M | re.S)
    file = tmp_path / "loraserve.toml"
    file.write_text(table)
    given = serve.make_context("serve", ["--config", str(file)]).params
    assert (given["model"], given["max_num_seqs"]) == ("path/to/model", 64)
    assert [module.name for module in given["lora_modules"]] == ["sql"]


@pytest.mark.parametrize(
    "line",
    [
        "loraserve adapter upload sql folder",
        "loraserve keys create --role admin --tennant x",
        "loraserve keys create --role king",
        "loraserve adapter rollback sql extra",
        "loraserve serve model --redis-grace soon",
    ],
)
def test_an_invalid_command_is_detected(line: str) -> None:
    (words,) = commands_of(line)
    with pytest.raises(click.UsageError):
        check(words)

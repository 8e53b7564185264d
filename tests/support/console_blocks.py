"""The commands that a document's console blocks tell its reader to type."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

BLOCK = re.compile(r"^```console\n(.*?)^```", re.M | re.S)
PROMPT = "$ "


def console_commands(document: Path) -> list[str]:
    """Each command as a reader copies it, with all its lines. Leaves out the output that a block shows."""
    return [command for block in BLOCK.findall(document.read_text()) for command in _commands(block)]


def _commands(block: str) -> Iterator[str]:
    lines = iter(block.splitlines())
    for line in lines:
        if not line.startswith(PROMPT):
            continue
        command = line.removeprefix(PROMPT)
        while not _is_whole(command):
            command += f"\n{next(lines)}"
        yield command


def _is_whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:  # An open quote, or nothing after a backslash.
        return False
    return not command.endswith("\\")

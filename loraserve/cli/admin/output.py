"""Prints the results of management commands, as JSON or as text."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import rich_click as click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

Json = dict[str, Any]
COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red"}
MAX_PROBLEMS = 10
MAX_UNBROKEN = 32
"""Characters of a row's first cell: enough for an id, not for every adapter's name."""
MAX_LINE = 10_000
"""Characters per line when stdout is not a terminal."""
UNITS = ("B", "kB", "MB", "GB", "TB")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Never truncates: users pass printed values, such as ids, to other commands.

    On a terminal, rows wrap to its width; otherwise each row is one line. The first column, which names the row, does
    not wrap unless a cell in it is long.
    """
    cells = [[_shown(cell) for cell in row] for row in rows]
    is_short = all(len(row[0]) <= MAX_UNBROKEN for row in cells)
    table = Table(*(Column(name, overflow="fold", no_wrap=is_short and i == 0) for i, name in enumerate(columns)))
    for row in cells:
        table.add_row(*map(Text, row))
    Console(width=None if sys.stdout.isatty() else MAX_LINE).print(table)


def print_fields(fields: Sequence[tuple[str, object]]) -> None:
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        click.echo(f"{name:<{width}}  {_shown(value)}")


def _shown(value: object) -> str:
    return "-" if value is None or value == "" else printable(str(value))


def printable(text: str) -> str:
    """Escapes terminal control characters: names and paths come from clients."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def print_csv(text: str) -> None:
    """Unchanged, except that terminal control characters are escaped on a terminal."""
    if sys.stdout.isatty():
        text = "".join(f"{printable(line)}\n" for line in text.splitlines())
    sys.stdout.write(text)


def print_report(report: Json) -> None:
    """Failures and warnings one by one, with remedies; then the number of checks that passed."""
    print_problems(report)
    num_passed = sum(check["status"] == "pass" for check in report["checks"])
    Console(stderr=True).print(f"{num_passed} checks passed", highlight=False)


def print_problems(report: Json) -> None:
    """Failures and warnings only; prints nothing if there are none."""
    console = Console(stderr=True)
    problems = [check for check in report["checks"] if check["status"] != "pass"]
    for check in problems[:MAX_PROBLEMS]:
        where = " · ".join(part for part in (check["file"], check["key"]) if part)
        line = Text(f"{check['status']:<5}", style=COLOURS[check["status"]])
        line.append(printable(f"{check['name']}: {check['message']}"), style="default not bold")
        console.print(line, soft_wrap=True)
        if where:
            console.print(f"      {printable(where)}", markup=False, highlight=False, soft_wrap=True)
        if check["found"] or check["expected"]:
            found = f"      found {check['found'] or '-'} → expected {check['expected'] or '-'}"
            console.print(printable(found), markup=False, highlight=False, soft_wrap=True)
        if check["remedy"]:
            console.print(f"      → {printable(check['remedy'])}", markup=False, highlight=False, soft_wrap=True)
    if len(problems) > MAX_PROBLEMS:
        console.print(f"and {len(problems) - MAX_PROBLEMS} more", highlight=False)


def bytes_text(count: float) -> str:
    for unit in UNITS:
        if count < 1000 or unit == UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes everything")


def time_text(unix_s: float | None) -> str:
    return "" if unix_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def limits_text(limits: Json) -> str:
    return ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None)

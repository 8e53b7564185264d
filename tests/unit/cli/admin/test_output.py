"""Values that others chose, such as names and paths, are printed as plain text."""

import io
import re
import sys

import pytest

from loraserve.cli.admin.output import print_csv, print_fields, print_problems, print_report, print_table, printable

CURSOR_UP = "\x1b[1A\x1b[2K"
CLIPBOARD = "\x1b]52;c;cm0gLXJm\x07"


@pytest.mark.parametrize("text", [CURSOR_UP, CLIPBOARD, "\x9b2J", "a\rb", "\u202eabc", "\udc80"])
def test_control_characters_are_never_printed(capsys: pytest.CaptureFixture[str], text: str) -> None:
    print_table(("subject",), [(f"GET /v1/keys/{text}",)])
    print_fields([("description", text)])
    check = {"status": "fail", "name": text, "message": text, "file": text, "key": text, "remedy": ""}
    print_report({"checks": [{**check, "found": text, "expected": text}]})
    for output in capsys.readouterr():
        assert all(char.isprintable() for char in output.replace("\n", "")), ascii(output)


def test_escaped_characters_stay_recognizable() -> None:
    assert printable("süß 東京") == "süß 東京"
    assert printable(f"a{CURSOR_UP}") == "a\\x1b[1A\\x1b[2K"


KEY_ROW = (
    "k3v2m7qa",
    "the shop's backend",
    "acme",
    "operator",
    "active",
    "sql, support",
    "requests_per_min 600",
    "never",
)
KEY_COLUMNS = ("id", "name", "tenant", "role", "status", "adapters", "limits", "expires")


@pytest.mark.parametrize(("columns", "row"), [(KEY_COLUMNS, KEY_ROW), (("name", "size"), ("n" * 64, "1 kB"))])
def test_a_narrow_terminal_wraps_cells_but_not_ids_and_truncates_nothing(
    monkeypatch: pytest.MonkeyPatch, columns: tuple[str, ...], row: tuple[str, ...]
) -> None:
    stdout = io.StringIO()
    monkeypatch.setattr(stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("COLUMNS", "60")
    print_table(columns, [row])
    shown = re.sub(r"\x1b\[\d*m", "", stdout.getvalue())
    assert all(len(line) <= 60 for line in shown.splitlines())
    below = [line.strip("│").split("│") for line in shown.splitlines() if line.startswith("│")]
    cells = ["".join(part.strip() for part in parts) for parts in zip(*below, strict=True)]
    assert [cell.replace(" ", "") for cell in cells] == [cell.replace(" ", "") for cell in row]
    assert row[0] in shown or len(row[0]) > 60


def test_each_row_is_one_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(KEY_COLUMNS, [KEY_ROW])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "k3v2m7qa" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == list(KEY_ROW)


def test_csv_is_escaped_only_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, expected in ((True, "a,b\n\\x1b[1A\\x1b[2K,1\n"), (False, f"a,b\n{CURSOR_UP},1\n")):
        stdout = io.StringIO()
        monkeypatch.setattr(stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stdout", stdout)
        print_csv(f"a,b\n{CURSOR_UP},1\n")
        assert stdout.getvalue() == expected


def test_print_problems_prints_warnings_but_no_passed_checks(capsys: pytest.CaptureFixture[str]) -> None:
    passed = {"status": "pass", "name": "config.json", "message": "plain JSON"}
    where = {"file": "adapter_config.json", "key": "base_model_name_or_path"}
    warned = {"status": "warn", "name": "config.base_model", "message": "trained on another", **where}
    print_problems({"checks": [passed]})
    assert capsys.readouterr().err == ""
    print_problems({"checks": [passed, {**warned, "found": "a", "expected": "b", "remedy": "Look whether it was."}]})
    told = capsys.readouterr().err
    assert "warn config.base_model: trained on another" in told
    assert "→ Look whether it was." in told
    assert "passed" not in told

import csv
import io

import pytest

from loraserve.control.csv_text import csv_text


@pytest.mark.parametrize("hostile", ["=1+1", "+A1", "-2", "@SUM(A1)", "\tx", "\rx"])
def test_names_that_look_like_formulas_are_quoted(hostile: str) -> None:
    (_, row) = csv.reader(io.StringIO(csv_text(["name"], [[hostile]]), newline=""))
    assert row == [f"'{hostile}"]


def test_numbers_and_quotes_are_preserved() -> None:
    text = csv_text(["a", "b", "c"], [[-3, 'say "hi", you', None]])
    assert [*csv.reader(io.StringIO(text, newline=""))] == [["a", "b", "c"], ["-3", 'say "hi", you', ""]]

import csv
import io

import pytest

from loraserve.control.csv_text import csv_text


@pytest.mark.parametrize("hostile", ["=1+1", "+A1", "-2", "@SUM(A1)", "\tx", "\rx"])
def test_no_name_is_taken_for_a_formula(hostile: str) -> None:
    (_, row) = csv.reader(io.StringIO(csv_text(["name"], [[hostile]]), newline=""))
    assert row == [f"'{hostile}"]


def test_numbers_and_quotes_come_through() -> None:
    text = csv_text(["a", "b", "c"], [[-3, 'say "hi", you', None]])
    assert [*csv.reader(io.StringIO(text, newline=""))] == [["a", "b", "c"], ["-3", 'say "hi", you', ""]]

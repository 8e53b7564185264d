"""Tables for spreadsheets."""

import csv
import io
from collections.abc import Iterable, Sequence

FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """RFC 4180, with a header line. No spreadsheet interprets a text as a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([_inert(cell) for cell in row])
    return out.getvalue()


def _inert(cell: object) -> object:
    """Spreadsheets interpret a text that begins with one of `FORMULA` as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell

import asyncio
from collections.abc import Iterator

import pytest

from loraserve.api.management.table_format import PIECE_BYTES, streamed_attachment


def taken(lines: Iterator[bytes]) -> list[bytes]:
    async def scenario() -> list[bytes]:
        return [piece async for piece in streamed_attachment(lines, "text/csv", "x.csv").iterator]

    return asyncio.run(scenario())


def test_whole_lines_are_sent_in_pieces_of_a_bounded_size() -> None:
    lines = [b"%07d\n" % number for number in range(PIECE_BYTES // 4)]
    pieces = taken(iter(lines))
    assert b"".join(pieces) == b"".join(lines)
    assert {len(piece) for piece in pieces} == {PIECE_BYTES}
    assert taken(iter(())) == []


def test_an_error_in_the_middle_is_not_taken_for_the_end() -> None:
    def lines() -> Iterator[bytes]:
        yield b"x" * PIECE_BYTES
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        taken(lines())

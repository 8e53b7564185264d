"""A file of requests: lines in the format of OpenAI's Batch API."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import rich_click as click
from msgspec import Meta, Raw

MAX_SHOWN = 10
"""Faults of a file that are shown."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""At the start of files from some Windows programs."""
ENDPOINT = re.compile(
    r"(/adapters/[^/?#\s]+)?(/v[12])?/"
    r"(chat/completions|classify|completions|embeddings|messages|rerank|responses|score)"
)


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file."""

    custom_id: Annotated[str, Meta(min_length=1)]
    url: str
    """A path on the server."""
    body: dict[str, Raw]
    method: Literal["POST"] = "POST"

    def content(self, fields: Mapping[str, object]) -> bytes:
        """The body as JSON. fields: they replace the body's own."""
        return msgspec.json.encode({**self.body, **fields})


@dataclass(frozen=True, slots=True)
class RequestsFile:
    """A file whose lines have been checked. They are read again as they are sent; only ids stay in memory."""

    path: Path
    custom_ids: frozenset[str]

    def requests(self) -> Iterator[BatchRequest]:
        """Raises `click.ClickException` if the file has changed and a line is no longer a request."""
        try:
            for line in _lines(self.path):
                yield line.request()
        except (ValueError, OSError) as error:
            raise click.ClickException(f"{self.path} has changed: {error}") from error


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    content: bytes

    def request(self) -> BatchRequest:
        """Raises `ValueError`."""
        try:
            self.content.decode()  # also checks the parts that are not parsed
            return _DECODER.decode(self.content)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


_DECODER = msgspec.json.Decoder(BatchRequest)


def check_requests(path: Path) -> RequestsFile:
    """Raises `click.ClickException` with the first faults, each with its line number."""
    if not path.is_file():
        raise click.ClickException(f"{path} cannot be read twice: write the requests to a regular file")
    line_of: dict[str, int] = {}
    shown: list[str] = []
    num_faults = 0
    for line in _lines(path):
        fault = _fault(line, line_of)
        if fault is not None:
            num_faults += 1
            if num_faults <= MAX_SHOWN:
                shown.append(f"{path}, line {line.number}: {fault}")
    if num_faults > MAX_SHOWN:
        shown.append(f"and {num_faults - MAX_SHOWN:,} more")
    if shown:
        raise click.ClickException("\n".join(shown))
    if not line_of:
        raise click.ClickException(f"{path} has no requests")
    return RequestsFile(path, frozenset(line_of))


def _fault(line: _Line, line_of: dict[str, int]) -> str | None:
    """What is wrong with a line. None = nothing; then its custom_id is in line_of."""
    try:
        request = line.request()
    except ValueError as error:
        return str(error)
    if ENDPOINT.fullmatch(request.url) is None:
        return f"url {request.url!r} is not a supported endpoint, such as /v1/chat/completions"
    if bytes(request.body.get("stream", b"false")) not in (b"false", b"null"):
        return "stream must be false: answers are written whole"
    first = line_of.setdefault(request.custom_id, line.number)
    return None if first == line.number else f"custom_id {request.custom_id!r} is also on line {first}"


def _lines(path: Path) -> Iterator[_Line]:
    """All lines that are not blank."""
    with path.open("rb") as file:
        for number, content in enumerate(file, start=1):
            if number == 1:
                content = content.removeprefix(BYTE_ORDER_MARK)
            if not content.isspace():
                yield _Line(number, content)

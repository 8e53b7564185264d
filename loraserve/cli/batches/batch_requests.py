"""A file of requests: lines as OpenAI's Batch API takes them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import rich_click as click
from msgspec import Meta, Raw

MAX_SHOWN = 10
"""Of the faults of a file."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Of files that some programs on Windows write."""
ENDPOINT = re.compile(
    r"(/adapters/[^/?#\s]+)?(/v[12])?/"
    r"(chat/completions|classify|completions|embeddings|messages|rerank|responses|score)"
)


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line."""

    custom_id: Annotated[str, Meta(min_length=1)]
    url: str
    """A path of the server."""
    body: dict[str, Raw]
    method: Literal["POST"] = "POST"

    def content(self, model: str | None) -> bytes:
        """The body, for that model if there is one."""
        return msgspec.json.encode(self.body if model is None else {**self.body, "model": model})


@dataclass(frozen=True, slots=True)
class RequestsFile:
    """One whose lines have been checked. They are read again as they are sent: only ids are in memory."""

    path: Path
    custom_ids: frozenset[str]

    def requests(self) -> Iterator[BatchRequest]:
        """Raises `click.ClickException` where they have changed so much that they are none."""
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
            self.content.decode()  # also what is not looked at any further
            return _DECODER.decode(self.content)
        except RecursionError:
            raise ValueError("it is nested too deep") from None


_DECODER = msgspec.json.Decoder(BatchRequest)


def check_requests(path: Path) -> RequestsFile:
    """Raises `click.ClickException` with the first faults, by line."""
    if not path.is_file():
        raise click.ClickException(f"{path} is no file that can be read twice: write the requests to one")
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
        raise click.ClickException(f"{path} has no request")
    return RequestsFile(path, frozenset(line_of))


def _fault(line: _Line, line_of: dict[str, int]) -> str | None:
    """Of a request, which gets its place in line_of if there is none."""
    try:
        request = line.request()
    except ValueError as error:
        return str(error)
    if ENDPOINT.fullmatch(request.url) is None:
        return f"url {request.url!r} is no endpoint that answers, such as /v1/chat/completions"
    if bytes(request.body.get("stream", b"false")) not in (b"false", b"null"):
        return "stream must be false: answers are written whole"
    first = line_of.setdefault(request.custom_id, line.number)
    return None if first == line.number else f"custom_id {request.custom_id!r} is also on line {first}"


def _lines(path: Path) -> Iterator[_Line]:
    """Those that are not blank."""
    with path.open("rb") as file:
        for number, content in enumerate(file, start=1):
            if number == 1:
                content = content.removeprefix(BYTE_ORDER_MARK)
            if not content.isspace():
                yield _Line(number, content)

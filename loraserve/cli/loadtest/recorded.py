"""Requests recorded in a file, so that servers and libraries can answer exactly the same ones."""

from pathlib import Path
from random import Random

import msgspec

from loraserve.cli.loadtest.arrivals import arrival_times_s
from loraserve.cli.loadtest.plan import PlannedRequest, Workload


class RecordedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file."""

    model: str
    prompt_token_ids: list[int]
    num_output_tokens: int


def read_recorded(path: Path) -> list[RecordedRequest]:
    """Raises `msgspec.DecodeError` for lines that are not requests."""
    return msgspec.json.Decoder(RecordedRequest).decode_lines(path.read_bytes())


def replay(recorded: list[RecordedRequest], workload: Workload) -> list[PlannedRequest]:
    """All recorded requests in order, at the workload's times."""
    times_s = arrival_times_s(len(recorded), workload.request_rate, workload.cv, Random(workload.seed))
    return [
        PlannedRequest(
            model=request.model,
            prompt=request.prompt_token_ids,
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.num_output_tokens,
            at_s=at_s,
        )
        for request, at_s in zip(recorded, times_s, strict=True)
    ]

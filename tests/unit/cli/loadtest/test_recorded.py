from pathlib import Path

import msgspec
import pytest

from loraserve.cli.loadtest.lengths import UniformLengths
from loraserve.cli.loadtest.plan import Workload
from loraserve.cli.loadtest.recorded import read_recorded, replay


def test_recorded_requests_are_replayed_unchanged_at_the_given_rate(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"model": "b", "prompt_token_ids": [11, 12], "num_output_tokens": 3}\n' * 2)
    requests = replay(read_recorded(file), Workload(["a"], 9, UniformLengths(20), UniformLengths(8), request_rate=10.0))
    assert [(request.model, request.prompt, request.prompt_tokens, request.max_tokens) for request in requests] == [
        ("b", [11, 12], 2, 3)
    ] * 2
    assert requests[1].at_s > requests[0].at_s > 0


def test_a_recorded_request_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"model": "b", "prompt_token_ids": [1], "num_output_tokens": 3, "temperature": 1}\n')
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        read_recorded(file)

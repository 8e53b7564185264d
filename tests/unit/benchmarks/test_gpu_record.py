import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu.record import Arm, Figure, Record, keep
from gpu.results import NotMeasured, Results

STEP = Record(Arm.LORA, Figure.DECODE_STEP, 64, 8, 128, 128, 4.5)
PREFILL = Record(Arm.LORA, Figure.PREFILL, 1, 1, 2048, 1, 40.0)


def failing() -> Iterator[Record]:
    yield STEP
    yield PREFILL
    raise RuntimeError("out of memory")


def test_what_was_measured_before_a_failure_is_kept_and_found(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(RuntimeError, match="out of memory"):
        keep(failing(), path)
    part = {"name": "engine", "content": json.loads(path.read_text())}
    results = Results({"parts": [part]}, num_tokens=128)
    assert results.records == [STEP, PREFILL]
    assert results.step_ms(Arm.LORA, 64, 8) == 4.5
    with pytest.raises(NotMeasured):
        results.step_ms(Arm.NO_LORA, 64, 8)


def test_every_record_is_printed_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    keep([STEP], None)
    assert capsys.readouterr().out.split() == "lora B64 D8 r16 128 in 128 out decode step ms 4.500".split()

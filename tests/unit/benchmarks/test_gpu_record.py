import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu.record import TIME_OVER, Arm, Figure, LeftOut, Record, keep, spread
from gpu.results import NotMeasured, Results
from gpu_suite import INCOMPLETE, Outcome, exit_code

STEP = Record(Arm.LORA, Figure.DECODE_STEP, 64, 8, 128, 128, 4.5)
PREFILL = Record(Arm.LORA, Figure.PREFILL, 1, 1, 2048, 1, 40.0)


def failing() -> Iterator[Record]:
    yield STEP
    yield PREFILL
    raise RuntimeError("out of memory")


def test_records_measured_before_a_failure_are_kept_and_can_be_read(tmp_path: Path) -> None:
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


def test_left_out_points_and_the_seed_are_written_with_the_results(tmp_path: Path) -> None:
    keep([STEP, LeftOut("r64", "no memory")], tmp_path / "results.json", seed=3)
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["seed"] == 3
    assert content["left_out"] == [{"what": "r64", "why": "no memory"}]
    assert len(content["results"]) == 1


def test_only_points_left_out_for_lack_of_time_make_a_run_incomplete(tmp_path: Path) -> None:
    keep([LeftOut("r64", "no memory"), STEP, LeftOut("decode of 64", TIME_OVER)], tmp_path / "results.json")
    content = json.loads((tmp_path / "results.json").read_text())
    assert [each["what"] for each in content["left_out"]] == ["r64", "decode of 64"]
    assert content["not_run"] == ["decode of 64"]
    assert exit_code({"engine": Outcome("engine", 0, 1.0, "", content)}, []) == INCOMPLETE


def test_repeats_are_recorded_as_median_and_deciles() -> None:
    about = (1, 0, 16, 1)
    record = spread(Arm.LORA, Figure.PREFILL, about, [float(value) for value in range(10, -1, -1)])
    assert (record.value, record.p10, record.p90, record.repeats) == (5.0, 1.0, 9.0, 11)
    single = spread(Arm.LORA, Figure.PREFILL, about, [2.0])
    assert (single.value, single.p10, single.p90, single.repeats) == (2.0, None, None, 1)

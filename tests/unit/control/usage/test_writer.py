import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from loraserve.control.usage.writer import AT_ONCE, UsageWriter
from loraserve.store.usage_log import BilledOutcome, UsageLine, UsageLog

AT = 1_760_000_000.0
DAY_S = 86_400.0


class Disk:
    """Accepts `num_left` more lines."""

    def __init__(self, log: UsageLog) -> None:
        self.num_left = 1 << 30
        self.num_tries = 0
        self._append = log.append
        log.append = self.append

    def append(self, line: UsageLine) -> None:
        self.num_tries += 1
        if self.num_left <= 0:
            raise OSError(28, "No space left on device")
        self._append(line)
        self.num_left -= 1


@pytest.fixture
def log(tmp_path: Path) -> Iterator[UsageLog]:
    log = UsageLog(tmp_path, "p1")
    yield log
    log.close()


@pytest.fixture
def disk(log: UsageLog) -> Disk:
    return Disk(log)


def line(number: int, at: float = AT) -> UsageLine:
    return UsageLine(
        request_id=f"request-{number}",
        at=at,
        tenant="acme",
        key_id="abcdefgh",
        adapter=None,
        version=None,
        digest=None,
        prompt_tokens=number,
        cached_tokens=0,
        output_tokens=7,
        outcome=BilledOutcome.STOP,
        ttft_ms=1.5,
        duration_ms=20.0,
    )


def written(data_dir: Path) -> list[int]:
    """Numbers of the lines, by day."""
    lines = [text for path in sorted(data_dir.glob("usage/*/*")) for text in path.read_bytes().splitlines()]
    return [msgspec.json.decode(text, type=UsageLine).prompt_tokens for text in lines]


def test_usage_lines_that_a_full_disk_rejects_are_written_once_it_has_room(
    log: UsageLog, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = UsageWriter(log)
    writer.write(line(1))
    disk.num_left = 0
    for number in (2, 3):
        writer.write(line(number))
    # After midnight.
    writer.write(line(4, AT + DAY_S))
    writer.retry()
    assert written(tmp_path) == [1]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    disk.num_left = 1
    writer.retry()
    assert written(tmp_path) == [1, 2]
    disk.num_left = 100
    writer.write(line(5, AT + DAY_S))
    writer.retry()
    writer.retry()
    assert written(tmp_path) == [1, 2, 3, 5, 4]
    assert "written again" in caplog.messages[-1]


def test_the_oldest_lines_above_the_limit_are_dropped_and_logged(
    log: UsageLog, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = UsageWriter(log, max_kept=2)
    disk.num_left = 0
    for number in range(1, 5):
        writer.write(line(number))
    dropped = [message for message in caplog.messages if "not billed" in message]
    assert [message.split(" could ")[0] for message in dropped] == [
        "the usage of request request-1",
        "the usage of request request-2",
    ]
    assert dropped[0].endswith("tenant acme, key abcdefgh, 1 prompt and 7 output tokens")
    disk.num_left = 100
    writer.retry()
    assert written(tmp_path) == [3, 4]


def test_close_writes_as_many_lines_as_possible_and_logs_the_rest(
    log: UsageLog, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = UsageWriter(log)
    disk.num_left = 0
    for number in range(AT_ONCE + 3):
        writer.write(line(number))
    disk.num_left = AT_ONCE + 1
    writer.close()
    assert written(tmp_path) == [*range(AT_ONCE + 1)]
    assert len([message for message in caplog.messages if "not billed" in message]) == 2


def test_each_retry_writes_a_limited_number_of_the_kept_lines(log: UsageLog, disk: Disk, tmp_path: Path) -> None:
    writer = UsageWriter(log)
    disk.num_left = 0
    for number in range(AT_ONCE + 1):
        writer.write(line(number))
    disk.num_left, disk.num_tries = 1 << 30, 0
    writer.retry()
    assert disk.num_tries == AT_ONCE
    writer.retry()
    assert len(written(tmp_path)) == AT_ONCE + 1

import os
from pathlib import Path

import msgspec
import pytest

from loraserve.store.errors import InvalidNameError
from loraserve.store.usage_files import list_logs, read_lines, remove_old_logs
from loraserve.store.usage_log import BilledOutcome, UsageLine, UsageLog

DAY_1 = 1_760_000_000.0  # 2025-10-09 08:53:20 UTC
DAY_2 = DAY_1 + 86_400


def line(number: int, at: float = DAY_1) -> UsageLine:
    return UsageLine(
        request_id=f"request-{number}",
        at=at,
        tenant="acme",
        key_id="abcdefgh",
        adapter="sql",
        version=1,
        digest="ab" * 32,
        prompt_tokens=number,
        cached_tokens=0,
        output_tokens=7,
        outcome=BilledOutcome.STOP,
        ttft_ms=1.5,
        duration_ms=20.0,
    )


def base_line() -> UsageLine:
    return msgspec.structs.replace(
        line(1), key_id=None, adapter=None, version=None, digest=None, ttft_ms=None, outcome=BilledOutcome.ABORTED
    )


@pytest.fixture
def log(tmp_path: Path):
    log = UsageLog(tmp_path, "p1")
    yield log
    log.close()


def test_appended_lines_are_read_from_the_given_offset_on(log: UsageLog, tmp_path: Path) -> None:
    log.append(line(1))
    log.append(base_line())
    (file,) = list_logs(tmp_path)
    assert (file.name, file.day, file.process) == ("20251009/p1", "20251009", "p1")
    first = read_lines(file.path, 0)
    assert (first.lines, first.next_offset, first.num_damaged) == ([line(1), base_line()], file.size_bytes, 0)
    log.append(line(3))
    second = read_lines(file.path, first.next_offset)
    assert second.lines == [line(3)]
    assert read_lines(file.path, second.next_offset).lines == []
    assert read_lines(file.path, second.next_offset).next_offset == second.next_offset


def test_a_long_log_is_read_completely_in_pieces(log: UsageLog, tmp_path: Path) -> None:
    for number in range(50):
        log.append(line(number))
    (file,) = list_logs(tmp_path)
    for max_bytes in (1, 300, 1000, 10_000):
        found: list[UsageLine] = []
        offset = 0
        while True:
            piece = read_lines(file.path, offset, max_bytes)
            if not piece.lines:
                break
            assert piece.next_offset > offset
            found += piece.lines
            offset = piece.next_offset
        assert found == [line(number) for number in range(50)]
        assert offset == file.size_bytes


def test_an_incomplete_last_line_is_not_read_until_it_is_complete(log: UsageLog, tmp_path: Path) -> None:
    log.append(line(1))
    log.append(line(2))
    (file,) = list_logs(tmp_path)
    whole = file.path.read_bytes()
    first_length = whole.index(b"\n") + 1
    torn = tmp_path / "torn.jsonl"
    for length in range(first_length, len(whole)):
        torn.write_bytes(whole[:length])
        found = read_lines(torn, 0)
        assert (found.lines, found.next_offset, found.num_damaged) == ([line(1)], first_length, 0)
        assert read_lines(torn, first_length, max_bytes=1).lines == []


def test_a_line_cut_off_by_a_crash_is_skipped_when_the_log_is_continued(tmp_path: Path) -> None:
    log = UsageLog(tmp_path, "p1")
    log.append(line(1))
    log.close()
    (file,) = list_logs(tmp_path)
    with open(file.path, "ab") as torn:
        torn.write(b'{"request_id":"half')
    again = UsageLog(tmp_path, "p1")
    again.append(line(2))
    again.close()
    found = read_lines(file.path, 0)
    assert found.lines == [line(1), line(2)]
    assert found.num_damaged == 1
    assert found.next_offset == file.path.stat().st_size


def test_a_full_disk_leaves_no_incomplete_line(log: UsageLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append(line(1))
    write = os.write
    calls: list[int] = []

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:10])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            log.append(line(2))
    log.append(line(3))
    (file,) = list_logs(tmp_path)
    assert read_lines(file.path, 0).lines == [line(1), line(3)]


def test_if_a_days_file_cannot_be_started_the_next_line_starts_it(
    log: UsageLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    log.append(line(1))
    with monkeypatch.context() as patched:
        patched.setattr("loraserve.store.usage_log.sync_folder", fail)
        with pytest.raises(OSError, match="Input/output error"):
            log.append(line(2, DAY_2))
    # After a failed write the new file is truncated to its own length, not to that of yesterday's file.
    write, calls = os.write, []

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(descriptor)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:10])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            log.append(line(2, DAY_2))
    log.append(line(3, DAY_2))
    assert [read_lines(file.path, 0).lines for file in list_logs(tmp_path)] == [[line(3, DAY_2)], [line(1)]]


def test_each_day_and_process_has_its_own_file_and_the_newest_day_comes_first(log: UsageLog, tmp_path: Path) -> None:
    other = UsageLog(tmp_path, "p0")
    log.append(line(1))
    log.append(line(2, DAY_2))
    other.append(line(3))
    log.append(line(4, DAY_1))
    other.close()
    assert [file.name for file in list_logs(tmp_path)] == ["20251010/p1", "20251009/p0", "20251009/p1"]
    found = [read_lines(file.path, 0).lines for file in list_logs(tmp_path)]
    assert found == [[line(2, DAY_2)], [line(3)], [line(1), line(4)]]


def test_sync_makes_lines_of_the_current_and_the_previous_day_durable(
    log: UsageLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append(line(1))
    log.append(line(2, DAY_2))
    synced: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.path.basename(os.path.dirname(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    log.sync()
    assert synced == ["20251009", "20251010"]
    log.sync()
    assert len(synced) == 2
    log.append(line(3, DAY_2))
    log.sync()
    assert synced[2:] == ["20251010"]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    log = UsageLog(tmp_path, "p1")
    for number in range(6):
        log.append(line(number, DAY_1 + number % 2 * 86_400))
        if number == 3:
            log.sync()
    log.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_days_beyond_retention_are_removed(log: UsageLog, tmp_path: Path) -> None:
    for day in range(5):
        log.append(line(day, DAY_1 + day * 86_400))
    (tmp_path / "usage" / "notes").mkdir()
    assert remove_old_logs(tmp_path, "20251013", keep_days=3) == ["20251009", "20251010"]
    assert [file.day for file in list_logs(tmp_path)] == ["20251013", "20251012", "20251011"]
    assert remove_old_logs(tmp_path, "20251013", keep_days=3) == []
    assert (tmp_path / "usage" / "notes").exists()


@pytest.mark.parametrize("process", ["", "../x", "A", "a/b", "a.b", "-a", "a" * 65, "a\n"])
def test_an_invalid_process_name_is_refused(tmp_path: Path, process: str) -> None:
    with pytest.raises(InvalidNameError, match="use 1 to 64 characters from a-z, 0-9 and '-'"):
        UsageLog(tmp_path, process)


def test_a_usage_line_has_no_field_for_request_text() -> None:
    assert set(UsageLine.__struct_fields__) == {
        *("request_id", "at", "tenant", "key_id", "adapter", "adapter_tenant", "version", "digest", "prompt_tokens"),
        *("cached_tokens", "output_tokens", "outcome", "ttft_ms", "duration_ms"),
    }


def test_logs_are_listed_from_a_day_on(log: UsageLog, tmp_path: Path) -> None:
    log.append(line(1))
    log.append(line(2, at=DAY_2))
    assert [file.day for file in list_logs(tmp_path)] == ["20251010", "20251009"]
    assert [file.day for file in list_logs(tmp_path, "20251010")] == ["20251010"]

import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from gpu.decode import Side
from gpu.first_token import FROM_DISK, cold_start, drop_pages, file_reads, prefills
from gpu.record import Arm, Figure
from gpu.work import Prefill, Work

from loraserve.engine.engine import Engine


def test_a_files_pages_are_dropped_after_it_was_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *arguments: calls.append(arguments))
    path = tmp_path / "adapter"
    path.write_bytes(b"1" * 5_000_000)
    drop_pages(path)
    assert calls == ["fsync", (0, 0, os.POSIX_FADV_DONTNEED)]


def test_pages_are_dropped_before_each_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("gpu.first_token.drop_pages", lambda _: calls.append("drop"))

    def read(_: Path) -> float:
        calls.append("read")
        return float(len(calls))

    monkeypatch.setattr("gpu.first_token.read_pages", read)
    on_disk, in_cache = file_reads(Work(cold_repeats=3), tmp_path / "adapter")
    assert calls == ["drop", "read", "read"] * 3
    assert (on_disk.figure, on_disk.value, on_disk.repeats) == (Figure.DISK_READ, 5000.0, 3)
    assert (in_cache.figure, in_cache.value, in_cache.repeats) == (Figure.FILE_READ, 6000.0, 3)


class FakeEngine:
    """The `first_tokens_s` below answers its requests; the time returned is the number of calls so far, in seconds."""

    def __init__(self, calls: list[str], name: str) -> None:
        self.calls = calls
        self.name = name

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(resident_adapters=())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def first_tokens_s(engine: FakeEngine, digests: list[str]) -> float:
        calls.append(f"{engine.name}{digests[0]}")
        return float(len(calls))

    monkeypatch.setattr("gpu.first_token.make_requests", lambda _engine, digests, *_: digests)
    monkeypatch.setattr("gpu.first_token.first_tokens_s", first_tokens_s)
    return calls


def test_a_cold_adapter_is_prepared_right_before_its_first_request(calls: list[str]) -> None:
    work = Work(cold_prompts=(16,), cold_repeats=2)
    records = cold_start(cast(Engine, FakeEngine(calls, "")), work, FROM_DISK, "used", ["a", "b"], calls.append)
    assert calls == ["used", "a", "a", "a", "b", "b", "b"]
    cold, added, warm = records
    assert (cold.figure, cold.value) == (Figure.FROM_DISK, (3 + 6) / 2 * 1e3)
    assert (added.figure, added.value) == (Figure.FROM_DISK_ADDS, -1e3)
    assert (warm.figure, warm.value) == (Figure.FIRST_TOKEN, (4 + 7) / 2 * 1e3)


def test_engines_take_turns_computing_prompts(calls: list[str]) -> None:
    sides = [
        Side(cast(Engine, FakeEngine(calls, name)), arm, [name]) for name, arm in (("A", Arm.NO_LORA), ("B", Arm.LORA))
    ]
    base, with_lora = prefills(sides, Work(prefill_repeats=3), Prefill(1, 16, 1))
    assert "".join(call[0] for call in calls) == "ABBAABBA"
    assert (base.arm, base.value, base.repeats) == (Arm.NO_LORA, 5e3, 3)
    assert (with_lora.arm, with_lora.value, with_lora.repeats) == (Arm.LORA, 6e3, 3)

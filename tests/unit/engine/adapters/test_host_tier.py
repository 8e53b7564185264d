from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.file_state import FileState
from loraserve_adapters.packed import PackedTable
from torch import Tensor

from loraserve.engine.adapters.host_tier import HostTier, StagedAdapter, choose_host_tier_bytes
from loraserve.engine.errors import EngineStartError
from tests.support.host_accelerator import HostAccelerator, HostEvent

GIB = 1 << 30
UNIT = 256
FILE = FileState(1, 2, 3, 4, 5)
NONE = np.empty(0, np.int64)
TABLE = PackedTable("layout", "float32", 1, NONE, NONE, NONE, NONE, NONE, NONE)


@pytest.fixture
def tier() -> HostTier:
    """A tier of four units."""
    return HostTier(HostAccelerator(), 4 * UNIT)


def stage(tier: HostTier, digest: str, num_units: int) -> StagedAdapter:
    staged = tier.try_stage(digest, TABLE, num_units * UNIT, FILE, busy=())
    assert staged is not None
    tier.check_invariants()
    return staged


def running() -> Future[None]:
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def test_an_adapter_is_found_until_its_file_changes(tier: HostTier) -> None:
    staged = stage(tier, "a", 2)
    assert tier.find("a", FILE) is staged
    assert tier.find("a", replace(FILE, changed_ns=6)) is None
    assert tier.used_bytes == 0
    assert tier.find("a", FILE) is None


def test_an_adapter_whose_file_is_gone_is_forgotten(tier: HostTier) -> None:
    stage(tier, "a", 2)
    assert tier.find("a", None) is None
    assert tier.used_bytes == 0


def test_adapters_do_not_share_memory(tier: HostTier) -> None:
    payloads: list[Tensor] = [stage(tier, digest, 1).payload for digest in "abcd"]
    for value, payload in enumerate(payloads):
        payload.fill_(value)
    assert [payload.unique().tolist() for payload in payloads] == [[0], [1], [2], [3]]


def test_the_least_recently_used_adapters_are_forgotten_first(tier: HostTier) -> None:
    for digest in "abcd":
        stage(tier, digest, 1)
    tier.find("a", FILE)
    stage(tier, "e", 1)
    assert [digest for digest in "abcde" if tier.find(digest, FILE)] == ["a", "c", "d", "e"]


def test_adapters_that_are_busy_or_being_filled_or_copied_are_not_forgotten(tier: HostTier) -> None:
    filling, copied = stage(tier, "filling", 1), stage(tier, "copied", 1)
    stage(tier, "busy", 2)
    filling.filling = running()
    copied.copied = HostEvent()
    assert tier.try_stage("a", TABLE, UNIT, FILE, busy=["busy"]) is None
    assert tier.used_bytes == 4 * UNIT
    filling.filling.set_result(None)
    assert tier.try_stage("a", TABLE, UNIT, FILE, busy=["busy"]) is not None
    assert tier.find("filling", FILE) is None


def test_try_stage_free_takes_free_space_but_forgets_no_adapter(tier: HostTier) -> None:
    stage(tier, "a", 3)
    assert tier.try_stage_free("b", TABLE, UNIT, FILE) is not None
    assert tier.try_stage_free("c", TABLE, UNIT, FILE) is None
    assert tier.find("a", FILE) is not None


def test_no_adapter_is_forgotten_for_one_larger_than_the_tier(tier: HostTier) -> None:
    stage(tier, "a", 3)
    assert tier.try_stage("b", TABLE, 5 * UNIT, FILE, busy=()) is None
    assert tier.find("a", FILE) is not None


def test_an_adapter_whose_filling_failed_is_forgotten(tier: HostTier) -> None:
    staged = stage(tier, "a", 2)
    staged.filling = running()
    assert tier.find("a", FILE) is staged
    staged.filling.set_exception(AdapterError("bad_packed_file", "damaged"))
    assert tier.find("a", FILE) is None
    assert tier.used_bytes == 0


def test_find_marks_a_filled_adapter_as_complete(tier: HostTier) -> None:
    staged = stage(tier, "a", 2)
    staged.filling = running()
    staged.filling.set_result(None)
    assert tier.find("a", FILE) is staged
    assert staged.filling is None


def test_forget_cancels_a_pending_filling_and_waits_for_a_copy(tier: HostTier) -> None:
    staged = stage(tier, "a", 2)
    staged.filling = Future()
    copied = HostEvent()
    tier.forget("a")
    assert staged.filling.cancelled(), "it had not begun"
    stage(tier, "b", 2)
    tier.note_copied("b", copied)
    tier.forget("b")
    assert copied.is_done
    tier.check_invariants()


@pytest.mark.parametrize(
    ("requested", "available", "expected"),
    [(None, 200 * GIB, 4 * GIB), (None, 15 * GIB, GIB), (None, 0, 0), (0, GIB, 0), (777, GIB, 777)],
)
def test_the_default_size_is_at_most_a_tenth_of_the_available_memory_and_at_most_4_gib(
    requested: int | None, available: int, expected: int
) -> None:
    assert choose_host_tier_bytes(requested, HostAccelerator(), available) == expected


def test_a_size_that_locks_more_than_the_available_memory_is_refused() -> None:
    with pytest.raises(
        EngineStartError, match=r"--adapter-host-memory-bytes 1100 locks 2048 bytes, but only 2000 are available"
    ):
        choose_host_tier_bytes(1100, HostAccelerator(), 2000)
    assert choose_host_tier_bytes(1024, HostAccelerator(), 1024) == 1024


def test_a_cpu_has_no_tier() -> None:
    assert choose_host_tier_bytes(None, None, 100 * GIB) == 0
    assert choose_host_tier_bytes(0, None, 100 * GIB) == 0
    with pytest.raises(EngineStartError, match="--adapter-host-memory-bytes 5 is for GPUs only, but this is a CPU"):
        choose_host_tier_bytes(5, None, 100 * GIB)


def test_the_error_for_memory_that_cannot_be_locked_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(HostAccelerator, "host_buffer", refuse)
    with pytest.raises(
        EngineStartError, match=r"--adapter-host-memory-bytes 1024 cannot be page-locked.*out of memory"
    ):
        HostTier(HostAccelerator(), 4 * UNIT)

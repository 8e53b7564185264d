import contextlib
import mmap
import resource
from itertools import groupby

import pytest
import torch
from torch import Tensor

from loraserve.engine import pages_ahead
from loraserve.engine.pages_ahead import AHEAD_BYTES, SLICE_BYTES, PagesAhead
from tests.support.memory_pages import can_populate, resident_pages

pytestmark = pytest.mark.skipif(not can_populate(), reason="the system cannot touch pages by request")

KIB = 1 << 10
PAGE = mmap.PAGESIZE


def untouched(num_blocks: int, block_bytes: int) -> Tensor:
    """[num_blocks, block_bytes] of new memory, which reads as zeros and starts within a page."""
    mapped = mmap.mmap(-1, num_blocks * block_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)[64 : 64 + num_blocks * block_bytes].view(num_blocks, block_bytes)


def num_resident_bytes(caches: list[Tensor]) -> int:
    return sum(sum(resident_pages(cache)) for cache in caches) * PAGE


def touch_all(pages: PagesAhead, num_used: int) -> int:
    num_slices = 0
    while pages.touch_next(num_used):
        num_slices += 1
    return num_slices


def test_small_caches_are_touched_completely_and_keep_their_contents() -> None:
    caches = [untouched(300, 7 * KIB), untouched(300, 24 * KIB), untouched(300, 100)]
    written = [torch.randint_like(cache[20:40], 256) for cache in caches]
    for cache, values in zip(caches, written, strict=True):
        cache[20:40] = values
    assert not all(resident_pages(caches[0]))
    assert touch_all(PagesAhead(caches), 0) == -(-300 // (SLICE_BYTES // (24 * KIB))) * len(caches)
    for cache, values in zip(caches, written, strict=True):
        assert all(resident_pages(cache))
        assert torch.equal(cache[20:40], values)
        assert not cache[:20].any()
        assert not cache[40:].any()


def test_writing_to_touched_memory_takes_no_page_faults() -> None:
    cache = untouched(128, 64 * KIB)
    assert not cache.any(), "reading makes pages present, but not writable"
    touch_all(PagesAhead([cache]), 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cache.fill_(1)
    num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert num_faults < len(resident_pages(cache)) // 4


@pytest.mark.parametrize("block_bytes", [100, 7 * KIB, 24 * KIB, 3 << 20], ids=lambda n: f"{n} bytes")
def test_slices_are_small_and_start_with_the_lowest_blocks(block_bytes: int) -> None:
    caches = [untouched((16 << 20) // block_bytes, block_bytes) for _ in range(2)]
    pages = PagesAhead(caches)
    while True:
        before = num_resident_bytes(caches)
        if not pages.touch_next(0):
            break
        assert 0 < num_resident_bytes(caches) - before <= max(SLICE_BYTES, block_bytes) + 2 * PAGE
        for cache in caches:
            assert [resident for resident, _ in groupby(resident_pages(cache))] in ([True], [False], [True, False])
    assert all(all(resident_pages(cache)) for cache in caches)


def test_touches_a_limited_number_of_bytes_ahead_of_the_used_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_bytes, block_bytes = 1 << 20, 16 * KIB
    monkeypatch.setattr(pages_ahead, "AHEAD_BYTES", ahead_bytes)
    caches = [untouched(512, block_bytes), untouched(512, block_bytes)]
    pages = PagesAhead(caches)
    for num_used in (0, 10, 10, 40, 100, 500, 512):
        for cache in caches:
            cache[:num_used] = 1
        touch_all(pages, num_used)
        left_bytes = sum(cache[num_used:].nbytes for cache in caches)
        ahead = num_resident_bytes(caches) - num_used * block_bytes * len(caches)
        assert min(left_bytes, ahead_bytes * 3 // 4) <= ahead <= ahead_bytes + 2 * PAGE * len(caches)


def test_touching_skips_blocks_that_are_already_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_ahead, "AHEAD_BYTES", 1 << 20)
    cache = untouched(1024, 16 * KIB)
    pages = PagesAhead([cache])
    assert pages.touch_next(0)
    assert pages.touch_next(512)
    assert any(resident_pages(cache[512:]))
    assert not any(resident_pages(cache[64:448]))


def test_the_first_blocks_of_a_model_with_many_layers_are_touched() -> None:
    caches = [untouched(64, 64 * KIB)] * 400
    pages = PagesAhead(caches)
    touch_all(pages, 0)
    num_ahead = AHEAD_BYTES // (400 * 64 * KIB)
    assert all(resident_pages(caches[0][: num_ahead * 3 // 4]))
    assert not any(resident_pages(caches[0][num_ahead + 1 :]))


def test_madvise_is_not_retried_after_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = untouched(64, 64 * KIB)
    pages = PagesAhead([cache])
    with monkeypatch.context() as context:
        context.setattr(pages_ahead, "_MADV_POPULATE_WRITE", 12345)
        assert not pages.touch_next(0)
    assert not pages.touch_next(0)
    assert not any(resident_pages(cache))


def test_nothing_is_touched_on_systems_other_than_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    cache = untouched(64, 64 * KIB)
    assert not PagesAhead([cache]).touch_next(0)
    assert not any(resident_pages(cache))


def test_device_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(pages_ahead, "_madvise", lambda: lambda *args: calls.append(args) or 0)
    assert PagesAhead([torch.empty((8, 4096))]).touch_next(0)
    assert len(calls) == 1
    assert not PagesAhead([torch.empty((8, 4096), device="meta")]).touch_next(0)
    assert len(calls) == 1


def test_a_model_without_caches_has_nothing_to_touch() -> None:
    assert not PagesAhead([]).touch_next(0)

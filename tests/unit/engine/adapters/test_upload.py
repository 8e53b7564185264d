from concurrent.futures import Future

import numpy as np
import pytest
import torch
from loraserve_adapters.errors import AdapterError
from torch import Tensor

from loraserve.engine.adapters.arrival import CopyParts
from loraserve.engine.adapters.upload import AdapterUploader
from tests.support.host_accelerator import HostAccelerator

PARTS = CopyParts((300, 1000), (0, 1))
"""Two groups, each a part of its own."""


@pytest.fixture
def accelerator() -> HostAccelerator:
    return HostAccelerator()


@pytest.fixture
def uploader(accelerator: HostAccelerator) -> AdapterUploader:
    return AdapterUploader(accelerator, piece_bytes=64)


@pytest.fixture
def payload() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, 1000, np.uint8)


@pytest.fixture
def destination() -> Tensor:
    return torch.zeros(1000, dtype=torch.uint8)


def refuse() -> np.ndarray:
    raise AdapterError("bad_packed_file", "damaged")


def test_pieces_arrive_in_their_places(
    accelerator: HostAccelerator, uploader: AdapterUploader, payload: np.ndarray, destination: Tensor
) -> None:
    arrival = uploader.start_reading(destination, PARTS, lambda: payload, None).result()
    assert accelerator.waited_for == [], "copies wait for no step of their own accord"
    arrival.before_group(0)
    assert np.array_equal(destination[:300], payload[:300])
    assert not np.array_equal(destination, payload)
    arrival.before_group(1)
    assert np.array_equal(destination, payload)


def test_a_payload_that_was_read_stays_in_page_locked_memory(
    uploader: AdapterUploader, payload: np.ndarray, destination: Tensor
) -> None:
    locked = torch.zeros(1000, dtype=torch.uint8)
    arrival = uploader.start_reading(destination, PARTS, lambda: payload, locked).result()
    assert np.array_equal(locked, payload)
    arrival.before_all()
    assert np.array_equal(destination, payload)


def test_page_locked_memory_is_copied_part_by_part(
    accelerator: HostAccelerator, uploader: AdapterUploader, payload: np.ndarray, destination: Tensor
) -> None:
    arrival = uploader.start(destination, PARTS, torch.from_numpy(payload))
    assert accelerator.waited_for == []
    assert not destination.any(), "the host waits for no copy"
    arrival.before_group(0)
    assert np.array_equal(destination[:300], payload[:300])
    assert not destination[300:].any()
    arrival.before_group(1)
    assert np.array_equal(destination, payload)


def test_follow_makes_the_side_stream_wait_for_the_event(
    accelerator: HostAccelerator, uploader: AdapterUploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_side: list[bool] = []
    monkeypatch.setattr(HostAccelerator, "wait_for", lambda self, _: on_side.append(self.side.is_current))
    uploader.follow(accelerator.record())
    assert on_side == [True]


def test_a_copy_can_wait_until_its_source_is_filled(
    uploader: AdapterUploader, payload: np.ndarray, destination: Tensor
) -> None:
    locked = torch.zeros(1000, dtype=torch.uint8)
    filled: Future[None] = Future()
    queued = uploader.start_when(filled, destination, PARTS, locked)
    assert not queued.done()
    uploader.fill(locked, lambda: payload).result()
    filled.set_result(None)
    queued.result().before_all()
    assert np.array_equal(destination, payload)


def test_a_failed_read_raises_its_error_and_copies_nothing(
    accelerator: HostAccelerator, uploader: AdapterUploader, destination: Tensor
) -> None:
    locked = torch.zeros(1000, dtype=torch.uint8)
    filling = uploader.fill(locked, refuse)
    for queued in (
        uploader.start_reading(destination, PARTS, refuse, locked),
        uploader.start_when(filling, destination, PARTS, locked),
    ):
        with pytest.raises(AdapterError):
            queued.result()
    assert not accelerator.side.queued

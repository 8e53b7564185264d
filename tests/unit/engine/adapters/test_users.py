from concurrent.futures import wait
from pathlib import Path

import pytest
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.packed import PackedAdapter

from loraserve.engine.adapters import memory as adapter_memory
from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.adapters.users import AdapterUsers
from tests.support.host_accelerator import HostAccelerator
from tests.support.packed_adapters import TinyAdapter, acquire, make_adapter_memory

ADAPTER = TinyAdapter(1, 1)
DIGEST = ADAPTER.digest


@pytest.fixture
def memory() -> AdapterMemory:
    return make_adapter_memory(4)


@pytest.fixture
def users(memory: AdapterMemory, tmp_path: Path) -> AdapterUsers:
    """With one adapter loaded."""
    users = AdapterUsers(memory)
    users.load(DIGEST, str(ADAPTER.write(tmp_path)))
    return users


def test_an_adapter_can_be_used_between_its_load_and_its_unload(users: AdapterUsers, memory: AdapterMemory) -> None:
    assert users.can_enter(DIGEST)
    assert not users.can_enter(TinyAdapter(2, 1).digest)
    users.unload(DIGEST)
    assert not users.can_enter(DIGEST)
    assert not memory.knows(DIGEST)
    assert users.take_unloaded() == [DIGEST]
    assert users.take_unloaded() == []


def test_reading_an_adapter_starts_when_its_first_request_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the request is scheduled, so that acquiring the adapter does not wait for its file."""
    monkeypatch.setattr(adapter_memory, "UPLOAD_WAIT_S", 60)
    memory = make_adapter_memory(4, accelerator=HostAccelerator())
    users = AdapterUsers(memory)
    users.load(DIGEST, str(ADAPTER.write(tmp_path)))
    users.enter(DIGEST)
    memory.wait_for_upload()
    assert memory.try_acquire(DIGEST) is not None


def test_prefetching_for_a_request_does_not_displace_adapters_prefetched_for_earlier_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each adapter of a long queue would be read twice."""
    monkeypatch.setattr(adapter_memory, "UPLOAD_WAIT_S", 60)
    memory = make_adapter_memory(1, accelerator=HostAccelerator(), host_tier_units=2)
    users = AdapterUsers(memory)
    running, *waiting = [TinyAdapter(value, 1) for value in range(1, 6)]
    for adapter in (running, *waiting):
        users.load(adapter.digest, str(adapter.write(tmp_path)))
    acquire(memory, running)
    transit = memory._transit
    assert transit is not None
    tier = transit._tier
    assert tier is not None

    def wait_for_readers() -> None:
        wait([found.filling for found in tier._staged.values() if found.filling is not None])

    wait_for_readers()
    read: list[str] = []
    read_verified = memory._files.read_verified

    def count(digest: str, path: Path) -> PackedAdapter:
        read.append(digest)
        return read_verified(digest, path)

    monkeypatch.setattr(memory._files, "read_verified", count)
    for adapter in waiting:
        users.enter(adapter.digest)
        wait_for_readers()
    memory.release(running.digest)
    for adapter in waiting:
        acquire(memory, adapter)
        memory.release(adapter.digest)
        users.leave(adapter.digest)
    assert len(read) <= len(waiting)


def test_an_unload_waits_for_the_last_request_and_admits_no_new_one(users: AdapterUsers, memory: AdapterMemory) -> None:
    users.enter(DIGEST)
    users.enter(DIGEST)
    users.unload(DIGEST)
    users.leave(DIGEST)
    assert not users.can_enter(DIGEST)
    assert memory.knows(DIGEST)
    assert users.take_unloaded() == []
    users.leave(DIGEST)
    assert users.take_unloaded() == [DIGEST]
    assert not memory.knows(DIGEST)
    assert (users.num_requests, users.unloading) == ({}, set())


def test_a_load_cancels_an_unload(users: AdapterUsers, tmp_path: Path) -> None:
    users.enter(DIGEST)
    users.unload(DIGEST)
    users.load(DIGEST, str(ADAPTER.write(tmp_path)))
    assert users.can_enter(DIGEST)
    users.leave(DIGEST)
    assert users.take_unloaded() == []
    assert users.can_enter(DIGEST)


def test_a_failed_load_does_not_cancel_an_unload(users: AdapterUsers, tmp_path: Path) -> None:
    users.enter(DIGEST)
    users.unload(DIGEST)
    with pytest.raises(AdapterError) as raised:
        users.load(DIGEST, str(tmp_path / "gone"))
    assert raised.value.code == "missing_file"
    users.leave(DIGEST)
    assert users.take_unloaded() == [DIGEST]


def test_without_lora_loads_fail_and_an_unload_completes_at_once(tmp_path: Path) -> None:
    users = AdapterUsers(None)
    with pytest.raises(AdapterError) as raised:
        users.load(DIGEST, str(ADAPTER.write(tmp_path)))
    assert raised.value.code == "lora_disabled"
    assert not users.can_enter(DIGEST)
    users.unload(DIGEST)
    assert users.take_unloaded() == [DIGEST]

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.rules import DEFAULT_RULES

from loraserve.cli.serve import configured_adapters
from loraserve.cli.serve.configured_adapters import AdapterDirWatch, ConfiguredAdapters, Refusal, notes_on_refusals
from loraserve.cli.serve.option_types import LoraModule
from loraserve.cli.serve.start_error import StartError
from loraserve.control.control_plane import ControlPlane
from loraserve.serving.errors import ErrorCode, ServingError
from tests.support.management import fake_adapter
from tests.unit.adapters.folders import tiny_layout


def configured_with(data_dir: Path) -> ConfiguredAdapters:
    settings = SimpleNamespace(data_dir=data_dir, adapter_rules=DEFAULT_RULES)
    control = SimpleNamespace(declared=SimpleNamespace(settings=settings))
    return ConfiguredAdapters(cast(ControlPlane, control), tiny_layout())


def test_an_adapter_is_read_at_the_first_start_and_after_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    read_adapter, now_ns = configured_adapters.read_adapter, time.time_ns
    monkeypatch.setattr(configured_adapters, "read_adapter", lambda *args: reads.append(args[0]) or read_adapter(*args))
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 60_000_000_000)
    folder = fake_adapter(tmp_path / "adapter", 1)

    def digest() -> str:
        """The digest at one start, which requests it twice."""
        configured = configured_with(tmp_path)
        found = configured._digest(folder)
        assert configured._digest(folder) == found
        asyncio.run(configured.save())
        return found

    first = digest()
    assert (digest(), len(reads)) == (first, 1)
    fake_adapter(folder, 2)
    second = digest()
    assert (second != first, len(reads)) == (True, 2)
    (folder / "adapter_config.json").write_text("{")
    for _ in range(2):
        with pytest.raises(AdapterError):
            digest()
    assert len(reads) == 4


def broken_at(*names: str) -> Callable[[LoraModule], Awaitable[Refusal | None]]:
    """Stands in for `ConfiguredAdapters.try_publish`."""

    async def try_publish(adapter: LoraModule) -> Refusal | None:
        await asyncio.sleep(0)
        error = ServingError(ErrorCode.ADAPTER_REJECTED, "broken")
        return Refusal(adapter, error) if adapter.name in names else None

    return try_publish


def numbered(count: int) -> list[LoraModule]:
    return [LoraModule(str(number), Path("/adapters") / str(number)) for number in range(count)]


def test_a_start_fails_at_the_first_named_adapter_that_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configured, done = configured_with(tmp_path), []
    monkeypatch.setattr(configured, "try_publish", broken_at("3"))
    with pytest.raises(StartError, match=r"adapter '3' .* broken"):
        asyncio.run(configured.publish(numbered(100), [], done.append))
    assert len(done) < 3 * configured_adapters.PUBLISHED_AT_ONCE


def test_found_adapters_that_are_refused_do_not_prevent_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    configured, done = configured_with(tmp_path), []
    monkeypatch.setattr(configured, "try_publish", broken_at("3", "9"))
    named, found = numbered(2), numbered(20)
    refusals = asyncio.run(configured.publish(named, found, done.append))
    assert [refusal.adapter.name for refusal in refusals] == ["3", "9"]
    assert done == [*range(1, 23)]
    assert warnings(caplog) == [f"adapter '{name}' from /adapters/{name}: broken" for name in ("3", "9")]
    assert notes_on_refusals(refusals, 20) == [
        "2 of 20 folders in --adapter-dir refused, for reasons in the log: '3', '9'"
    ]
    assert notes_on_refusals([], 20) == []


class Published:
    """Stands in for `ConfiguredAdapters` and records the names that are published."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.saved_after: list[int] = []
        """Number of names at each call of `save`."""
        self.cause: AdapterError | ServingError | None = None

    async def try_publish(self, adapter: LoraModule) -> Refusal | None:
        self.names.append(adapter.name)
        return None if self.cause is None else Refusal(adapter, self.cause)

    async def save(self) -> None:
        self.saved_after.append(len(self.names))


class Watched:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.published = Published()
        self.watch = AdapterDirWatch(folder, cast(ConfiguredAdapters, self.published))

    def looks(self, count: int = 1) -> list[str]:
        """The names published by `count` scans."""
        self.published.names.clear()
        for _ in range(count):
            asyncio.run(self.watch.scan())
        return [*self.published.names]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    fake_adapter(tmp_path / "old", 1)
    return Watched(tmp_path)


def test_new_or_changed_folders_are_published_once_they_stop_changing(watched: Watched) -> None:
    assert watched.looks(3) == []
    fake_adapter(watched.folder / "new", 2)
    (watched.folder / "not_an_adapter").mkdir()
    assert watched.looks() == []
    (watched.folder / "new" / "adapter_model.safetensors").write_bytes(b"more of it has come")
    assert watched.looks() == []
    assert watched.looks() == ["new"]
    assert watched.looks(3) == []
    fake_adapter(watched.folder / "old", 3)
    assert watched.looks(3) == ["old"]
    shutil.rmtree(watched.folder / "new")
    assert watched.looks(2) == []
    fake_adapter(watched.folder / "new", 2)
    assert watched.looks(3) == ["new"]


def test_folders_that_reappear_unchanged_are_not_published_again(watched: Watched) -> None:
    """As after a disk was unmounted for a while: adapters deleted from the server in that time stay deleted."""
    watched.folder.rename(watched.folder.with_name("away"))
    assert watched.looks(2) == []
    watched.folder.with_name("away").rename(watched.folder)
    assert watched.looks(3) == []


def test_a_scan_saves_the_digests_once_after_all_that_it_published(watched: Watched) -> None:
    for seed, name in enumerate(("x", "y", "z")):
        fake_adapter(watched.folder / name, seed)
    assert watched.looks(3) == ["x", "y", "z"]
    assert watched.published.saved_after == [3]


def test_a_scan_that_is_cancelled_saves_the_digests_too(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled(_adapter: LoraModule) -> None:
        raise asyncio.CancelledError

    fake_adapter(watched.folder / "new", 2)
    assert watched.looks() == []
    monkeypatch.setattr(watched.published, "try_publish", cancelled)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watched.watch.scan())
    assert watched.published.saved_after == [0]


def test_a_folder_is_ignored_until_both_files_are_there(watched: Watched) -> None:
    fake_adapter(watched.folder / "new", 2)
    weights = watched.folder / "new" / "adapter_model.safetensors"
    weights.rename(watched.folder / "aside")
    assert watched.looks(3) == []
    (watched.folder / "aside").rename(weights)
    assert watched.looks(2) == ["new"]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    "cause", [AdapterError("bad_json", "it is bad"), ServingError(ErrorCode.ADAPTER_REJECTED, "it is bad")]
)
def test_an_invalid_adapter_is_logged_once_until_it_changes(
    cause: AdapterError | ServingError, watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    fake_adapter(watched.folder / "bad", 2)
    watched.published.cause = cause
    assert watched.looks(4) == ["bad"]
    fake_adapter(watched.folder / "bad", 3)
    assert watched.looks(4) == ["bad"]
    assert warnings(caplog) == [f"adapter 'bad' from {watched.folder / 'bad'}: it is bad"] * 2


def test_another_failure_is_retried_and_logged_once(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    fake_adapter(watched.folder / "new", 2)
    watched.published.cause = ServingError(ErrorCode.SERVICE_UNAVAILABLE, "not now")
    assert watched.looks(4) == ["new"] * 3
    watched.published.cause = None
    assert watched.looks(3) == ["new"]
    assert warnings(caplog) == [f"adapter 'new' from {watched.folder / 'new'}: not now"]


def test_what_failed_at_the_start_is_tried_again_only_if_it_may_pass(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = LoraModule("old", watched.folder / "old")
    watched.watch.retry([Refusal(adapter, AdapterError("bad_json", "it is bad"))])
    assert watched.looks(3) == []
    not_now = ServingError(ErrorCode.SERVICE_UNAVAILABLE, "not now")
    watched.watch.retry([Refusal(adapter, not_now)])
    watched.published.cause = not_now
    assert watched.looks(2) == ["old"] * 2
    assert warnings(caplog) == []
    watched.published.cause = None
    assert watched.looks(3) == ["old"]

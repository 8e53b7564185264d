import json
import os
import shutil
import time
from pathlib import Path

import pytest

from loraserve.store.known_sources import KnownSources

FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_bytes(b"content")
    return folder


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs a minute ahead: files count as written a minute ago."""
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 60_000_000_000)


def remembered(data_dir: Path, folder: Path, digest: str = "d", read_as: str = "base") -> None:
    known = KnownSources(data_dir, read_as)
    states = known.begin(folder)
    assert states is not None
    known.remember(folder, states, digest)
    known.save()


def test_a_source_is_known_after_a_restart_if_its_files_are_unchanged(folder: Path, tmp_path: Path) -> None:
    assert KnownSources(tmp_path, "base").digest(folder) is None
    remembered(tmp_path, folder)
    assert KnownSources(tmp_path, "base").digest(folder) == "d"
    for _ in range(2):  # a source that was looked up stays known
        again = KnownSources(tmp_path, "base")
        assert again.digest(folder) == "d"
        again.save()


@pytest.mark.parametrize("name", FILES)
def test_a_source_is_not_known_once_a_file_was_written_replaced_or_lost(
    folder: Path, tmp_path: Path, name: str
) -> None:
    path = folder / name
    remembered(tmp_path, folder)
    before = path.stat()
    path.write_bytes(b"CONTENT")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert KnownSources(tmp_path, "base").digest(folder) is None
    remembered(tmp_path, folder)
    (tmp_path / "other").write_bytes(b"another")
    (tmp_path / "other").replace(path)
    assert KnownSources(tmp_path, "base").digest(folder) is None
    remembered(tmp_path, folder)
    path.unlink()
    known = KnownSources(tmp_path, "base")
    assert known.digest(folder) is None
    assert known.begin(folder) is None


def test_a_symbolic_link_is_known_by_its_target(folder: Path, tmp_path: Path) -> None:
    """As in the Hugging Face cache."""
    link, other = tmp_path / "link", tmp_path / "elsewhere"
    link.symlink_to(folder)
    remembered(tmp_path, link)
    assert KnownSources(tmp_path, "base").digest(link) == "d"
    other.mkdir()
    for name in FILES:
        (other / name).write_bytes(b"content")
    link.unlink()
    link.symlink_to(other)
    assert KnownSources(tmp_path, "base").digest(link) is None


def test_a_source_is_not_known_for_another_base_model(folder: Path, tmp_path: Path) -> None:
    remembered(tmp_path, folder)
    assert KnownSources(tmp_path, "another base").digest(folder) is None
    remembered(tmp_path, folder, "other", "another base")
    assert KnownSources(tmp_path, "another base").digest(folder) == "other"
    assert KnownSources(tmp_path, "base").digest(folder) == "d"


def test_a_recently_written_source_is_not_remembered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_ns = (folder / FILES[0]).stat().st_mtime_ns
    monkeypatch.setattr(time, "time_ns", lambda: written_ns + 1_000_000)
    assert KnownSources(tmp_path, "base").begin(folder) is None


def test_a_source_stays_known_after_starts_that_do_not_look_it_up(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    remembered(tmp_path, folder)
    KnownSources(tmp_path, "base").save()
    assert KnownSources(tmp_path, "base").digest(folder) == "d"
    remembered(tmp_path, other, "other")
    again = KnownSources(tmp_path, "base")
    assert (again.digest(folder), again.digest(other)) == ("d", "other")


def test_folders_that_are_gone_are_forgotten(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    remembered(tmp_path, folder)
    shutil.rmtree(folder)
    remembered(tmp_path, other)
    (file,) = tmp_path.glob("sources-*.json")
    assert [*json.loads(file.read_bytes())] == [str(other)]


def test_nothing_is_written_if_nothing_was_added(folder: Path, tmp_path: Path) -> None:
    remembered(tmp_path, folder)
    (file,) = tmp_path.glob("sources-*.json")
    known = KnownSources(tmp_path, "base")
    assert known.digest(folder) == "d"
    file.unlink()
    known.save()
    assert not file.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"x": 1}', b"\xff"])
def test_a_damaged_sources_file_is_treated_as_missing(folder: Path, tmp_path: Path, content: bytes) -> None:
    remembered(tmp_path, folder)
    (file,) = tmp_path.glob("sources-*.json")
    file.write_bytes(content)
    assert KnownSources(tmp_path, "base").digest(folder) is None
    remembered(tmp_path, folder)
    assert KnownSources(tmp_path, "base").digest(folder) == "d"

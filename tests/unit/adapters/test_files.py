"""Symlinks in a folder whose files must lie below certain roots, made by a user who can write below these roots."""

import os
import socket
from pathlib import Path

import pytest
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.files import open_regular
from loraserve_adapters.limits import AdapterLimits

NAME = "adapter_config.json"
INSIDE, OUTSIDE = b"inside", b"outside"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Has a folder `adapter` to read; `tmp_path` has the files that lie outside."""
    root = tmp_path / "root"
    (root / "adapter").mkdir(parents=True)
    (root / "inside").write_bytes(INSIDE)
    (tmp_path / "outside").write_bytes(OUTSIDE)
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "outside").write_bytes(OUTSIDE)
    return root


def read(root: Path, *more_roots: Path) -> bytes:
    limits = AdapterLimits(link_roots=(str(root), *map(str, more_roots)))
    with open_regular(root / "adapter", NAME, limits) as (descriptor, size):
        return os.pread(descriptor, size, 0)


def link(root: Path, target: str | Path) -> None:
    (root / "adapter" / NAME).unlink(missing_ok=True)
    (root / "adapter" / NAME).symlink_to(target)


def test_links_to_files_below_a_root_are_followed(root: Path, tmp_path: Path) -> None:
    (root / "again").symlink_to("inside")
    (root / "folder").symlink_to(".")
    (tmp_path / "back").symlink_to(root / "inside")
    targets = ("../inside", root / "inside", "../again", "../folder/inside", "../../back", "../../root/inside")
    for target in targets:
        link(root, target)
        assert read(root) == INSIDE, target
    link(root, "../../root2/outside")
    assert read(root, tmp_path / "root2") == OUTSIDE


def test_a_regular_file_is_read(root: Path) -> None:
    (root / "adapter" / NAME).write_bytes(INSIDE)
    assert read(root) == INSIDE


def test_links_that_lead_outside_are_refused_with_one_message_that_reveals_nothing(root: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (root / "adapter" / "folder").symlink_to(tmp_path)
    (root / "adapter" / "loop").symlink_to("loop")
    (tmp_path / "closed").mkdir(mode=0)
    held = os.open(tmp_path / "outside", os.O_RDONLY)
    outside = [
        tmp_path / "outside",
        "../../outside",
        "folder/outside",
        "../../root2/outside",
        "../../root/../outside",
        f"/proc/self/fd/{held}",
        "/proc/self/root/etc/passwd",
        "/proc/self/environ",
        "/dev/zero",
        "../../fifo",
        "../../missing",
        "../../closed/missing",
        "loop",
        "..",
    ]
    messages = set()
    for target in outside:
        link(root, target)
        with pytest.raises(AdapterError) as refused:
            read(root)
        assert refused.value.code == "not_a_regular_file", target
        messages.add(refused.value.message)
    os.close(held)
    (message,) = messages
    assert str(tmp_path) not in message


def test_links_to_non_files_below_a_root_are_refused_without_blocking(root: Path) -> None:
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(root / "socket"))
        for target in ("../fifo", "../socket", "../adapter"):
            link(root, target)
            with pytest.raises(AdapterError) as refused:
                read(root)
            assert refused.value.code == "not_a_regular_file", target


@pytest.mark.parametrize("exchanged", ["file", "folder"])
def test_a_link_that_replaces_a_checked_file_or_folder_is_not_followed(
    root: Path, tmp_path: Path, exchanged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "folder").mkdir()
    (root / "folder" / "inside").write_bytes(INSIDE)
    (tmp_path / "inside").write_bytes(OUTSIDE)
    link(root, "../folder/inside")
    resolve = os.path.realpath

    def resolve_then_exchange(path: Path) -> str:
        found = resolve(path)
        (root / "folder" / "inside").unlink()
        if exchanged == "file":
            (root / "folder" / "inside").symlink_to(tmp_path / "inside")
        else:
            (root / "folder").rmdir()
            (root / "folder").symlink_to(tmp_path)
        return found

    monkeypatch.setattr("loraserve_adapters.files.os.path.realpath", resolve_then_exchange)
    with pytest.raises(AdapterError) as refused:
        read(root)
    assert refused.value.code == "not_a_regular_file"

import os
from pathlib import Path

import pytest
from loraserve_adapters.limits import DEFAULT_LIMITS

from loraserve.control.uploads.source import FollowLinks, open_source
from loraserve.serving.errors import ErrorCode, ServingError


@pytest.mark.parametrize(
    ("links", "is_ours", "is_followed"),
    [
        (FollowLinks.NEVER, True, False),
        (FollowLinks.IN_OWN_FOLDERS, True, True),
        (FollowLinks.IN_OWN_FOLDERS, False, False),
        (FollowLinks.ALWAYS, False, True),
    ],
)
def test_links_are_followed_only_if_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: FollowLinks, is_ours: bool, is_followed: bool
) -> None:
    folder, elsewhere = tmp_path / "snapshot", tmp_path / "blobs"
    for made in (folder, elsewhere):
        made.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (elsewhere / name).write_bytes(b"{}")
        (folder / name).symlink_to(elsewhere / name)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner if is_ours else owner + 1)
    if is_followed:
        with open_source(folder, roots=None, follow_links=links, limits=DEFAULT_LIMITS) as source:
            assert [file.size_bytes for file in source.files] == [2, 2]
        return
    with (
        pytest.raises(ServingError, match="symbolic link"),
        open_source(folder, roots=None, follow_links=links, limits=DEFAULT_LIMITS),
    ):
        pass


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Contains an adapter in `team/adapter`. Another one, in `tmp_path / "outside" / "adapter"`, is not below it."""
    root = tmp_path / "root"
    for folder in (root / "team" / "adapter", tmp_path / "outside" / "adapter"):
        folder.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_bytes(b"{}")
    return root


def opened(path: Path, root: Path) -> int:
    with open_source(path, roots=[root], follow_links=FollowLinks.NEVER, limits=DEFAULT_LIMITS) as source:
        return len(source.files)


def test_a_folder_must_be_a_root_or_below_one_once_links_are_resolved(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root / "team")
    assert opened(root / "team" / "adapter", root) == 2
    assert opened(root / "team" / "adapter", root / "team" / "adapter") == 2
    assert opened(tmp_path / "link" / "adapter", root) == 2
    (root / "team" / "out").symlink_to(tmp_path / "outside")
    for path in (tmp_path / "outside" / "adapter", root / "team" / "out" / "adapter", tmp_path / "root2", root / "no"):
        with pytest.raises(ServingError) as refused:
            opened(path, root)
        assert refused.value.code is ErrorCode.ADAPTER_NOT_FOUND


@pytest.mark.parametrize(("exchanged", "led_to"), [("team", "outside"), ("team/adapter", "outside/adapter")])
def test_a_folder_replaced_by_a_link_after_the_check_is_not_opened(
    root: Path, tmp_path: Path, exchanged: str, led_to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if its name does not reveal it: the target of a link in /proc/PID/root may have the same name as ours."""
    resolve, asked = Path.resolve, root / "team" / "adapter"

    def resolve_then_exchange(path: Path, strict: bool = False) -> Path:
        found = resolve(path, strict)
        if path == asked:
            (root / exchanged).rename(tmp_path / "away")
            (root / exchanged).symlink_to(tmp_path / led_to)
            monkeypatch.setattr(os, "readlink", lambda _path: str(found))
        return found

    monkeypatch.setattr(Path, "resolve", resolve_then_exchange)
    with pytest.raises(ServingError) as refused:
        opened(asked, root)
    assert refused.value.code is ErrorCode.ADAPTER_NOT_FOUND

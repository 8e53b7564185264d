import os
from pathlib import Path

import pytest
from loraserve_adapters.limits import DEFAULT_LIMITS

from loraserve.control.uploads.source import FollowLinks, open_source
from loraserve.serving.errors import ServingError


@pytest.mark.parametrize(
    ("links", "is_ours", "is_followed"),
    [
        (FollowLinks.NEVER, True, False),
        (FollowLinks.IN_OWN_FOLDERS, True, True),
        (FollowLinks.IN_OWN_FOLDERS, False, False),
        (FollowLinks.ALWAYS, False, True),
    ],
)
def test_links_are_followed_where_they_may_be(
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

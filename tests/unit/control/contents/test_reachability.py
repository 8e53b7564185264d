import os
from dataclasses import replace
from pathlib import Path

import pytest
from loraserve_adapters.packed_file import packed_file_name

from loraserve.control.contents.reachability import sweep_contents
from loraserve.store.errors import DamagedFileError
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, Node, run, running_node, with_tenants

__all__ = ["valkey"]


def age(node: Node, digest: str, now: float) -> None:
    folder = node.blobs.folder(digest)
    assert folder is not None
    os.utime(folder, (now, now))


def test_only_contents_that_no_document_can_refer_to_are_swept(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            now = node.clock.now
            kept = await node.publish("kept", "kept")
            removed_version = await node.publish("versions", "old")
            await node.publish("versions", "new")
            await node.versions.delete(ACME, "r", "versions", 1)
            deleted = await node.publish("deleted", "deleted")
            await node.residency.load(deleted)
            await node.adapters.delete(ACME, "r", "deleted", drain_s=0)
            orphan, fresh = node.put_blob("orphan"), node.put_blob("fresh")
            for digest in (kept, removed_version, deleted, orphan):
                age(node, digest, now - 3601)
            age(node, fresh, now)
            for path in (data_dir / "packed").iterdir():
                os.utime(path, (now - 3601, now - 3601))
            assert set(sweep_contents(data_dir, data_dir / "packed", node.engine.model.layout, now)) == {
                removed_version,
                orphan,
            }
            assert len([*(data_dir / "packed").iterdir()]) == 1
            # After a day, a deleted adapter can no longer be restored.
            later = now + 86_400
            age(node, fresh, later)
            assert sweep_contents(data_dir, data_dir / "packed", node.engine.model.layout, later) == [deleted]
            assert [*(data_dir / "packed").iterdir()] == []

    run(scenario)


def test_packed_files_of_other_layouts_are_removed_if_unread_for_a_week(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            now, layout = node.clock.now, node.engine.model.layout
            digest = await node.publish("sql", "one")
            await node.residency.load(digest)
            packed_dir = data_dir / "packed"
            (ours,) = packed_dir.iterdir()
            assert ours.name == packed_file_name(digest, layout)
            earlier = packed_dir / packed_file_name(digest, replace(layout, fingerprint="e" * 64))
            other_base = packed_dir / packed_file_name(digest, replace(layout, fingerprint="b" * 64))
            a_week_ago = now - 7 * 86_400 - 1
            for path, read_at in ((ours, a_week_ago), (earlier, a_week_ago), (other_base, now - 86_400)):
                path.touch()
                os.utime(path, (read_at, a_week_ago))
            sweep_contents(data_dir, packed_dir, layout, now)
            assert {*packed_dir.iterdir()} == {ours, other_base}

    run(scenario)


def test_nothing_is_swept_while_a_document_cannot_be_read(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            digest = await node.publish("sql", "one")
            age(node, digest, 0)
            orphan = node.put_blob("orphan")
            age(node, orphan, 0)
            (revision,) = (data_dir / "docs" / "adapter").glob("*/*/*.json")
            revision.write_bytes(b"{")
            with pytest.raises(DamagedFileError):
                sweep_contents(data_dir, data_dir / "packed", node.engine.model.layout, node.clock.now)
            assert node.blobs.folder(digest) is not None
            assert node.blobs.folder(orphan) is not None

    run(scenario)

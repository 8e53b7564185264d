import asyncio
from pathlib import Path

import pytest

from loraserve.control.contents.stored import Contents
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.blobs import BLOB_FILES, MANIFEST_FILE, BlobStore

DIGEST = "ab" * 32


@pytest.mark.parametrize("content", [None, b"", b"{", b"{}", b"\xff\0"])
def test_a_lost_or_damaged_manifest_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    blobs = BlobStore(tmp_path)
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    for name in BLOB_FILES:
        (prepared / name).write_bytes(content or b"")
    blobs.publish(prepared, DIGEST)
    folder = blobs.folder(DIGEST)
    assert folder is not None
    if content is None:
        (folder / MANIFEST_FILE).unlink()
    with pytest.raises(ServingError) as raised:
        asyncio.run(Contents(blobs).manifest(DIGEST))
    assert raised.value.code is ErrorCode.ADAPTER_UNREADABLE
    assert str(tmp_path) not in raised.value.message
    assert DIGEST in caplog.text
    assert MANIFEST_FILE in caplog.text

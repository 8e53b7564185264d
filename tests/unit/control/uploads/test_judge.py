import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from loraserve_adapters.config import CONFIG_NAME
from loraserve_adapters.limits import AdapterLimits
from loraserve_adapters.safetensors_file import WEIGHTS_NAME

from loraserve.control.ingest.processes import Ingest
from loraserve.control.ingest.report import Report
from loraserve.control.uploads.judge import UploadJudge
from loraserve.store.uploads import UploadStore
from tests.support.management import fake_adapter


class Parts:
    """Stands in for an `UploadStore` whose uploads all have the same complete files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.loaded: list[str] = []

    def load(self, upload_id: str) -> "Parts":
        self.loaded.append(upload_id)
        return self

    def part_path(self, upload_id: str, name: str) -> Path:
        return self._folder / name

    def file(self, name: str) -> Any:
        return _File((self._folder / name).stat().st_size)


class _File:
    is_complete = True

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = self.received_bytes = size_bytes


class Accepts:
    async def judge(self, *_: object) -> Report:
        return Report(checks=[])


def test_only_the_most_recently_judged_uploads_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that was forgotten is judged again, as on a server that receives its first part of it."""
    monkeypatch.setattr("loraserve.control.uploads.judge.MAX_PASSED", 2)
    parts = Parts(fake_adapter(tmp_path / "adapter", 1))
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {CONFIG_NAME, WEIGHTS_NAME}
    judge = UploadJudge(cast(UploadStore, parts), cast(Ingest, Accepts()), AdapterLimits())

    async def judge_all(*upload_ids: str) -> list[str]:
        parts.loaded.clear()
        for upload_id in upload_ids:
            await judge.judge(upload_id)
        return parts.loaded

    assert asyncio.run(judge_all("one", "two", "one", "three")) == ["one", "two", "three"]
    assert asyncio.run(judge_all("one", "three")) == []
    assert asyncio.run(judge_all("two")) == ["two"]

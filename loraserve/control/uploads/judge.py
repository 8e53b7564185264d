"""Refuses content as soon as enough of its files has arrived to judge it, so that nobody sends gigabytes in vain."""

import asyncio
import contextlib
from pathlib import Path

from loraserve_adapters.checks import Checks
from loraserve_adapters.config import CONFIG_NAME, check_config
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import AdapterLimits
from loraserve_adapters.safetensors_file import LENGTH_BYTES, WEIGHTS_NAME, header_end

from loraserve.control.ingest.processes import Ingest, IngestError
from loraserve.control.ingest.report import AdapterRejectedError, Report
from loraserve.store.upload_session import UploadFile
from loraserve.store.uploads import UploadStore

MAX_PASSED = 4096
"""Uploads, of 400 bytes each. One that ends on another server is dropped only by this limit; one that is dropped and
continues is judged again."""


class UploadJudge:
    """Called on the event loop. The commit judges again what passed here, together with everything else."""

    def __init__(self, store: UploadStore, ingest: Ingest, limits: AdapterLimits) -> None:
        self._store = store
        self._ingest = ingest
        self._limits = limits
        self._passed: dict[str, set[str]] = {}
        """By upload: which of "config" and "header" passed. The upload that was judged last comes last."""

    async def judge(self, upload_id: str) -> None:
        """Judge the config and the header of the weights, once each. Raises `AdapterRejectedError`."""
        passed = self._passed[upload_id] = self._passed.pop(upload_id, set())
        if len(self._passed) > MAX_PASSED:
            del self._passed[next(iter(self._passed))]
        if len(passed) == 2:
            return
        session = await asyncio.to_thread(self._store.load, upload_id)
        config, weights = session.file(CONFIG_NAME), session.file(WEIGHTS_NAME)
        if config is None or weights is None or not config.is_complete:
            return
        config_path = self._store.part_path(upload_id, CONFIG_NAME)
        weights_path = self._store.part_path(upload_id, WEIGHTS_NAME)
        if "config" not in passed:
            _require_accepted(await asyncio.to_thread(_report_on_config, config_path, self._limits))
            passed.add("config")
        if await asyncio.to_thread(_has_header, weights_path, weights, self._limits):
            with contextlib.suppress(IngestError):
                # The commit judges it again, so a process that died here is no reason to refuse.
                _require_accepted(await self._ingest.judge(config_path, weights_path, weights.size_bytes))
            passed.add("header")

    def forget(self, upload_id: str) -> None:
        """Call when no more of the upload will arrive."""
        self._passed.pop(upload_id, None)


def _require_accepted(report: Report) -> None:
    if not report.accepted:
        raise AdapterRejectedError(report)


def _report_on_config(path: Path, limits: AdapterLimits) -> Report:
    """Without patterns, which are matched in a separate process."""
    checks = Checks()
    # A file that was announced as empty has no part on disk.
    check_config(path.read_bytes() if path.exists() else b"", limits, checks)
    return Report(checks=checks.listed())


def _has_header(path: Path, weights: UploadFile, limits: AdapterLimits) -> bool:
    """Whether enough has arrived to judge the header, or to refuse its length."""
    if weights.received_bytes < min(LENGTH_BYTES, weights.size_bytes) or not path.exists():
        return False
    with open(path, "rb") as file:
        first_bytes = file.read(LENGTH_BYTES)
    try:
        return weights.received_bytes >= header_end(first_bytes, weights.size_bytes, limits)
    except AdapterError:
        return True

import time
from pathlib import Path

import pytest
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import DEFAULT_LIMITS

from loraserve.cli.serve import control_start
from loraserve.store.known_sources import KnownSources
from tests.support.management import fake_adapter
from tests.unit.adapters.folders import tiny_layout


def test_an_adapter_is_read_at_the_first_start_and_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    read_adapter, now_ns = control_start.read_adapter, time.time_ns
    monkeypatch.setattr(control_start, "read_adapter", lambda *args: reads.append(args[0]) or read_adapter(*args))
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 60_000_000_000)
    folder = fake_adapter(tmp_path / "adapter", 1)

    def digest() -> str:
        known = KnownSources(tmp_path, "base")
        found = control_start._digest(folder, tiny_layout(), DEFAULT_LIMITS, known)
        known.save()
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

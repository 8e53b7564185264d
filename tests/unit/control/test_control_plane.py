import os
import time
from pathlib import Path

import pytest

from loraserve.control import control_plane
from loraserve.control.control_plane import STALE_FORM_S, STALE_OUTPUT_S
from loraserve.store.usage_log import BilledOutcome, UsageLine
from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import live_server, make_settings


@pytest.mark.parametrize(
    ("name", "stale_after_s"), [("spool/tmp1", STALE_FORM_S), ("packed/.0123456789ab-1", STALE_OUTPUT_S)]
)
@pytest.mark.parametrize("is_stale", [True, False], ids=["stale", "young"])
def test_startup_removes_stale_leftovers_of_a_killed_server_but_no_recent_ones(
    tmp_path: Path, name: str, stale_after_s: float, *, is_stale: bool
) -> None:
    left = tmp_path / name
    left.mkdir(parents=True)
    (left / "adapter_model.safetensors").write_bytes(b"a part")
    changed = time.time() - stale_after_s + (-60 if is_stale else 60)
    os.utime(left, (changed, changed))
    with live_server(FakeEngine(), make_settings(tmp_path)):
        assert left.exists() is not is_stale


def test_leftovers_that_were_recent_at_startup_are_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server killed in the middle of a form upload is restarted at once, and then runs for months."""
    monkeypatch.setattr(control_plane, "SWEEP_EVERY_S", 0.02)
    left = tmp_path / "spool" / "tmp1"
    left.mkdir(parents=True)
    (left / "adapter_model.safetensors").write_bytes(b"a part")
    with live_server(FakeEngine(), make_settings(tmp_path)) as server:
        assert left.exists()
        stale = time.time() - STALE_FORM_S - 60
        os.utime(left, (stale, stale))
        server.wait_until(lambda: not left.exists())


def test_usage_that_a_full_disk_rejected_is_in_the_log_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(line: UsageLine) -> None:
        raise OSError(28, "No space left on device")

    def logged() -> list[bytes]:
        return [text for path in tmp_path.glob("usage/*/*") for text in path.read_bytes().splitlines()]

    with live_server(FakeEngine(), make_settings(tmp_path)) as server:
        with monkeypatch.context() as patched:
            patched.setattr(server.control.usage_log, "append", full)
            server.call(lambda: server.control.usage_writer.write(line("kept")))
            assert logged() == []
        server.wait_until(lambda: len(logged()) == 1)
        monkeypatch.setattr(server.control.usage_log, "append", full)
        server.call(lambda: server.control.usage_writer.write(line("of the last second")))
        monkeypatch.undo()
    assert len(logged()) == 2


def line(request_id: str) -> UsageLine:
    return UsageLine(
        request_id=request_id,
        at=time.time(),
        tenant="default",
        key_id=None,
        adapter=None,
        version=None,
        digest=None,
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=1,
        outcome=BilledOutcome.STOP,
        ttft_ms=None,
        duration_ms=1.0,
    )

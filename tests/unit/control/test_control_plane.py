import os
import time
from pathlib import Path

import pytest

from loraserve.control.control_plane import STALE_FORM_S, STALE_OUTPUT_S
from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import live_server, make_settings


@pytest.mark.parametrize(
    ("name", "stale_after_s"), [("spool/tmp1", STALE_FORM_S), ("packed/.0123456789ab-1", STALE_OUTPUT_S)]
)
@pytest.mark.parametrize("is_stale", [True, False], ids=["stale", "young"])
def test_a_start_removes_what_a_killed_server_left_but_nothing_young(
    tmp_path: Path, name: str, stale_after_s: float, *, is_stale: bool
) -> None:
    left = tmp_path / name
    left.mkdir(parents=True)
    (left / "adapter_model.safetensors").write_bytes(b"a part")
    changed = time.time() - stale_after_s + (-60 if is_stale else 60)
    os.utime(left, (changed, changed))
    with live_server(FakeEngine(), make_settings(tmp_path)):
        assert left.exists() is not is_stale

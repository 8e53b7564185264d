"""What a server compiles, it compiles before it is ready: a variant of a kernel takes a second and more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def variants_while_serving(folder: Path, mode: str, max_num_seqs: int, max_num_rows: int) -> list[str]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "adapters"))
    program = Path(__file__).with_name("variants_while_serving.py")
    command = [sys.executable, "-W", "error", str(program), str(folder), mode, str(max_num_seqs), str(max_num_rows)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "max_num_seqs", "max_num_rows"),
    [("graphs", 128, 1024), ("eager", 33, 512), ("eager", 300, 300)],
)
def test_nothing_is_compiled_once_requests_are_served(tmp_path, mode, max_num_seqs, max_num_rows):
    assert variants_while_serving(tmp_path, mode, max_num_seqs, max_num_rows) == []

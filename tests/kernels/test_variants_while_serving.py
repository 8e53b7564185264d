"""A server compiles all kernels before it is ready: one variant of a kernel takes a second or more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


ENGINES = [("graphs", 128, 1024), ("eager", 33, 512), ("eager", 300, 300)]
"""Mode, max_num_seqs and max_num_batched_tokens."""


def variants_while_serving(folder: Path) -> list[list[str]]:
    """The kernels that each engine would compile while it serves."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "adapters"))
    environment["OMP_NUM_THREADS"] = "1"  # a forked process would lack other threads
    program = Path(__file__).with_name("variants_while_serving.py")
    words = [str(word) for engine in ENGINES for word in engine]
    command = [sys.executable, "-W", "error", str(program), str(folder), *words]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
def test_nothing_is_compiled_once_requests_are_served(tmp_path):
    assert dict(zip(ENGINES, variants_while_serving(tmp_path), strict=True)) == {engine: [] for engine in ENGINES}

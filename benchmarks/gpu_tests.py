"""The tests that need a GPU, each file in a process of its own and several at a time.

Compiling kernels takes most of their time, and each compiles on one core. Needs none of pytest's plugins.

Run: PYTHONPATH=.:kernels:adapters python benchmarks/gpu_tests.py
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu.part import argument_parser, write_json
from gpu.timing import require_cuda

ROOT = Path(__file__).parent.parent
FOLDERS = ("tests/kernels", "tests/inference")
NUM_PROCESSES = 8
"""Each has a CUDA context of some 500 MB."""
NO_TESTS = 5
"""pytest's exit code where no test of a file needs a GPU."""
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    *("-m", "gpu", "-q", "-p", "no:cacheprovider"),
    # pyproject.toml has options of plugins that need not be here.
    *("-o", "addopts=--import-mode=importlib --strict-markers -ra", "-W", "ignore::pytest.PytestConfigWarning"),
)


@dataclass(frozen=True, slots=True)
class Tested:
    """One file."""

    file: str
    exit_code: int
    """pytest's; 0 also for a file without tests for a GPU."""
    seconds: float
    summary: str
    """Its last line."""
    failures: list[str]
    """The lines pytest ends with, one for each."""


def files_to_test(root: Path = ROOT, folders: Sequence[str] = FOLDERS) -> list[str]:
    """Largest first: they take the longest."""
    found = [path for folder in folders for path in (root / folder).glob("test_*.py")]
    return [str(path.relative_to(root)) for path in sorted(found, key=lambda path: -path.stat().st_size)]


def run_file(file: str, root: Path = ROOT) -> Tested:
    """Its output is shown only if it fails."""
    started = time.monotonic()
    done = subprocess.run([*PYTEST, file], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.strip().splitlines() or [""]
    exit_code = 0 if done.returncode == NO_TESTS else done.returncode
    if exit_code:
        print(done.stdout, flush=True)
    failures = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return Tested(file, exit_code, round(time.monotonic() - started, 1), lines[-1], failures)


def run_files(files: Sequence[str], path: Path | None, end: float, root: Path = ROOT) -> list[Tested]:
    """Starts none after `end` (of `time.monotonic`).

    Writes all results after each, so that a run that is cut short keeps what it has.
    """
    tested: list[Tested] = []

    def run_in_time(file: str) -> Tested | None:
        return run_file(file, root) if time.monotonic() < end else None

    with ThreadPoolExecutor(min(NUM_PROCESSES, len(os.sched_getaffinity(0)))) as pool:
        for future in as_completed([pool.submit(run_in_time, file) for file in files]):
            result = future.result()
            if result is None:
                continue
            tested.append(result)
            print(f"{result.file:44} {result.seconds:6.1f} s  {result.summary}", flush=True)
            if path:
                not_run = sorted({*files} - {each.file for each in tested})
                write_json(path, {"results": [asdict(each) for each in tested], "not_run": not_run})
    return tested


def main() -> None:
    args = argument_parser(__doc__, budget_s=240).parse_args()
    require_cuda()
    files = files_to_test()
    tested = run_files(files, args.json, time.monotonic() + args.budget_s)
    failed = [each.file for each in tested if each.exit_code]
    print(f"{len(tested)} of {len(files)} files were run; failed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed) or len(tested) < len(files))


if __name__ == "__main__":
    main()

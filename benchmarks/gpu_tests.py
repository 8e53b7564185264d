"""Runs the tests that need a GPU: each file in one or more processes of its own, many processes at once.

Most of the time goes into compiling kernels, each on one core. Needs none of pytest's plugins.

Run: PYTHONPATH=.:kernels:adapters python benchmarks/gpu_tests.py
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu.part import argument_parser, write_json
from gpu.timing import require_cuda

BENCHMARKS = Path(__file__).parent
ROOT = BENCHMARKS.parent
FOLDERS = ("tests/kernels", "tests/inference")
FILES = {
    "tests/kernels/test_paged_attention.py": 6,
    "tests/inference/test_oracle_bfloat16.py": 5,
    "tests/inference/test_oracle_float32_on_gpu.py": 5,
    "tests/kernels/test_kv_float8.py": 2,
    "tests/kernels/test_sampling.py": 2,
    "tests/inference/test_gpu_engine.py": 1,
    "tests/inference/test_dora_adapters.py": 1,
    "tests/inference/test_trained_tokens.py": 1,
    "tests/inference/test_own_tables.py": 1,
    "tests/kernels/test_step_graphs.py": 1,
    "tests/kernels/test_float8_engine.py": 1,
    "tests/kernels/test_triton_engine.py": 1,
    "tests/kernels/test_paged_decode.py": 2,
    "tests/kernels/test_paged_prefill.py": 1,
    "tests/kernels/test_lora_add.py": 1,
    "tests/kernels/test_lora_embed.py": 1,
    "tests/kernels/test_lora_expand.py": 1,
    "tests/kernels/test_lora_experts.py": 1,
    "tests/kernels/test_lora_shrink.py": 1,
    "tests/kernels/test_rotary_kv_write.py": 1,
    "tests/kernels/test_rms_norm.py": 1,
    "tests/kernels/test_add_rms_norm.py": 1,
    "tests/kernels/test_kv_write.py": 1,
    "tests/kernels/test_silu_mul.py": 1,
    "tests/kernels/test_lora_replay.py": 1,
    "tests/kernels/test_gated_delta_rule.py": 1,
    "tests/kernels/test_selective_scan.py": 1,
    "tests/kernels/test_causal_conv.py": 1,
    "tests/kernels/test_latent.py": 1,
    "tests/inference/test_gpu_sampler.py": 1,
    "tests/kernels/test_argmax.py": 1,
    "tests/kernels/test_linear_rows.py": 1,
    "tests/kernels/test_choose_backend.py": 1,
}
"""Files in `FOLDERS` with GPU tests, and the number of processes that share each. The slowest come first, as far as
known without a GPU: attention has 170 kernels, which took one core 110 to 180 s to compile for Hopper, and the oracles
start 40 engines each, with two of ten architectures per process.
"""
NUM_PROCESSES = 16
"""Each has a CUDA context of about 500 MB."""
CUT_S = 5
"""After the time is over and no process is started any more, running ones get this long, then `END_S` to end."""
END_S = 5
CUT_OFF = -1
"""Stands in for pytest's exit code."""
NO_TESTS = 5
"""pytest's exit code if no test of a file needs a GPU."""
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    *("-m", "gpu", "-v", "-p", "no:cacheprovider", "-p", "gpu.pytest_share"),
    # Replaces those in pyproject.toml, which belong to plugins that may be missing here.
    *("-o", "addopts=--import-mode=importlib --strict-markers -ra"),
    # Warnings of a GPU machine's libraries are not ours; as errors, as elsewhere, one would fail every test.
    *("-W", "default", "-W", "ignore::pytest.PytestConfigWarning"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One process: a share of a file's tests."""

    file: str
    share: int
    num_shares: int

    @property
    def name(self) -> str:
        return self.file if self.num_shares == 1 else f"{self.file} {self.share + 1}/{self.num_shares}"


@dataclass(frozen=True, slots=True)
class Tested:
    """The result of one process."""

    file: str
    """The job's name."""
    exit_code: int
    """pytest's; 0 also if no test needs a GPU, `CUT_OFF` if it ran out of time."""
    seconds: float
    num_passed: int
    summary: str
    """The last line of its output."""
    failures: list[str]
    """Output lines of failed tests."""


def jobs_of(files: Mapping[str, int]) -> list[Job]:
    """One job for each share, in the order of the files."""
    return [Job(file, share, num_shares) for file, num_shares in files.items() for share in range(num_shares)]


def run_job(job: Job, end: float, root: Path = ROOT) -> Tested:
    """Prints the job's output only if it fails. Interrupts it at `end` and keeps its results so far."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        command = [*PYTEST, "--share", f"{job.share}/{job.num_shares}", job.file]
        process = subprocess.Popen(command, cwd=root, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        is_cut_off = process.poll() is None
        if is_cut_off:
            end_process(process)
        output.seek(0)
        text = output.read()
    exit_code = CUT_OFF if is_cut_off else 0 if process.returncode == NO_TESTS else process.returncode
    if exit_code:
        print(text, flush=True)
    lines = text.strip().splitlines() or [""]
    num_passed = sum(" PASSED" in line for line in lines)
    return Tested(job.name, exit_code, round(time.monotonic() - started, 1), num_passed, lines[-1], failures_of(lines))


def environment() -> dict[str, str]:
    """pytest's environment: finds its plugin, and gives torch one thread because the processes share the cores."""
    path = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{BENCHMARKS}{os.pathsep}{path}".rstrip(os.pathsep)}


def end_process(process: subprocess.Popen[bytes]) -> None:
    """When interrupted, pytest prints its results; in the middle of a compilation it may not react."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def failures_of(lines: Sequence[str]) -> list[str]:
    """pytest's summary lines, one per failure; if it was killed before those, the progress lines of failed tests."""
    summary = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return summary or [line for line in lines if " FAILED" in line or " ERROR" in line]


def run_jobs(jobs: Sequence[Job], path: Path | None, end: float, root: Path = ROOT) -> list[Tested]:
    """Starts no job after `end` (of `time.monotonic`), and cuts off jobs that still run `CUT_S` later.

    Writes all results after each job, so that a run that is cut short keeps what it has.
    """
    tested: list[Tested] = []

    def run_in_time(job: Job) -> Tested | None:
        return run_job(job, end + CUT_S, root) if time.monotonic() < end else None

    with ThreadPoolExecutor(min(NUM_PROCESSES, len(os.sched_getaffinity(0)))) as pool:
        for future in as_completed([pool.submit(run_in_time, job) for job in jobs]):
            result = future.result()
            if result is None:
                continue
            tested.append(result)
            print(f"{result.file:48} {result.seconds:6.1f} s  {result.summary}", flush=True)
            if path:
                content = {"results": [asdict(each) for each in tested], "not_run": not_run(jobs, tested)}
                write_json(path, content)
    return tested


def not_run(jobs: Sequence[Job], tested: Sequence[Tested]) -> list[str]:
    """Names of jobs that were not started or were cut off."""
    done = {each.file for each in tested if each.exit_code != CUT_OFF}
    return sorted(job.name for job in jobs if job.name not in done)


def main() -> None:
    args = argument_parser(__doc__, budget_s=240).parse_args()
    require_cuda()
    jobs = jobs_of(FILES)
    tested = run_jobs(jobs, args.json, time.monotonic() + args.budget_s)
    failed = [each.file for each in tested if each.failures or each.exit_code not in (0, CUT_OFF)]
    missing = not_run(jobs, tested)
    num_passed = sum(each.num_passed for each in tested)
    failed_names, missing_names = (", ".join(names) or "none" for names in (failed, missing))
    print(f"{num_passed} tests passed; files that failed: {failed_names}; not run to their end: {missing_names}")
    sys.exit(bool(failed or missing))


if __name__ == "__main__":
    main()

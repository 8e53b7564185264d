"""DoRA against plain LoRA: the same adapters with and without magnitudes.

Measures first uses, then prompts and decode steps with both kinds in turn.

Run: python benchmarks/bench_dora.py --model MODEL --adapters ADAPTER..., such as those in benchmarks/out
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from adapter_kinds import compare
from in_process import load_adapters, start_engine
from safetensors.torch import load_file, save_file
from torch import Tensor, ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    engine = start_engine(args.model, enable_lora=True)
    with tempfile.TemporaryDirectory() as folder:
        twins = [_with_magnitudes(path, Path(folder) / path.name) for path in args.adapters]
        digests = {
            "plain": [*load_adapters(engine, args.adapters, Path(folder)).values()],
            "dora": [*load_adapters(engine, twins, Path(folder)).values()],
        }
        compare(engine, digests)


def _with_magnitudes(plain: Path, folder: Path) -> Path:
    """A copy of the adapter with magnitudes of 1; their values do not affect the time."""
    shutil.copytree(plain, folder)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    tensors: dict[str, Tensor] = load_file(weights)
    magnitudes = {
        name.replace("lora_B.weight", "lora_magnitude_vector"): ones(len(tensor))
        for name, tensor in tensors.items()
        if name.endswith("lora_B.weight")
    }
    save_file(tensors | magnitudes, weights, metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    main()

"""Adapters with an `lm_head`, or with an `lm_head` and an embedding, of their own, against the same adapters without.

Measures first uses, then prompts and decode steps with each kind in turn.

Run: python benchmarks/bench_own_tables.py --model MODEL --adapters ADAPTER..., such as those in benchmarks/out
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from adapter_kinds import compare
from in_process import load_adapters, start_engine
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

KINDS = {"own head": ["lm_head"], "own head and embedding": ["model.embed_tokens", "lm_head"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    engine = start_engine(args.model, enable_lora=True)
    weights = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").state_dict()
    with tempfile.TemporaryDirectory() as folder:
        digests = {"plain": [*load_adapters(engine, args.adapters, Path(folder)).values()]}
        for kind, names in KINDS.items():
            tables = {f"base_model.model.{name}.weight": weights[f"{name}.weight"].clone() for name in names}
            with_tables = [_with_tables(path, Path(folder) / kind / path.name, names, tables) for path in args.adapters]
            digests[kind] = [*load_adapters(engine, with_tables, Path(folder)).values()]
        compare(engine, digests)


def _with_tables(plain: Path, folder: Path, names: list[str], tables: Mapping[str, Tensor]) -> Path:
    """A copy of the adapter with the tables, which for the time may be the base's."""
    shutil.copytree(plain, folder)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"modules_to_save": names}))
    save_file({**load_file(weights), **tables}, weights, metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    main()

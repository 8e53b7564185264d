"""The engine on a GPU without HTTP: an 8-billion-parameter Llama's shapes with random weights.

T1: B requests at once, 128 tokens in and out, with D distinct adapters of rank 16 on all linears; D = 0 also with an
engine that has no LoRA; the most adapters also of other ranks, and on attention's linears alone. T3: what an adapter on
the host, or in its file, adds to the first token. T5: where the time of a decode step goes. Also prompts with and
without adapters, and the floors of all decode steps.

Run: PYTHONPATH=.:kernels:adapters python benchmarks/bench_engine_gpu.py
"""

import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from gpu.decode import closed_loop, profile_steps
from gpu.engine import add_adapters, folder_bytes, remove_adapters, start_engine
from gpu.first_token import FROM_FILE, FROM_HOST, cold_start, prefill, use_once
from gpu.floor import machine_records
from gpu.llama import llama_8b
from gpu.part import argument_parser
from gpu.record import Arm, Record, keep
from gpu.timing import require_cuda
from gpu.work import AdapterKind, Work
from transformers import LlamaConfig

from loraserve.engine.engine import Engine
from loraserve.engine.errors import EngineStartError

Measurement = Callable[[], list[Record]]


def measure(config: LlamaConfig, work: Work, folder: Path, device: str, end: float) -> Iterator[Record]:
    """Starts no measurement once `end` (of `time.monotonic`) is past. Raises `EngineStartError`."""
    yield from machine_records(config, work, device)
    _free_memory(device)
    for measurements in (_without_lora, _with_lora):
        if time.monotonic() > end:
            return
        for measurement in measurements(config, work, folder, device):
            if time.monotonic() > end:
                return
            yield from measurement()
            del measurement  # it holds the engine
        _free_memory(device)


def _without_lora(config: LlamaConfig, work: Work, folder: Path, device: str) -> Iterator[Measurement]:
    engine = start_engine(config, work, folder / "model", device, enable_lora=False)
    for batch_size in work.batch_sizes:
        yield partial(closed_loop, engine, work, Arm.NO_LORA, batch_size, [], work.kind)
    for prompts in work.prefills:
        yield partial(prefill, engine, work, Arm.NO_LORA, prompts, [])


def _with_lora(config: LlamaConfig, work: Work, folder: Path, device: str) -> Iterator[Measurement]:
    engine = start_engine(config, work, folder / "model", device, enable_lora=True)
    num_cold, num_used = work.num_cold_adapters, work.max_adapters
    digests = add_adapters(engine, config, work.kind, folder / "adapters", num_cold + num_used + num_cold)
    on_host, used, in_file = digests[:num_cold], digests[num_cold:-num_cold], digests[-num_cold:]
    use_once(engine, work, [*on_host, *used])
    yield partial(cold_start, engine, work, FROM_HOST, used[-1], on_host)
    for batch_size in work.batch_sizes:
        counts = work.adapter_counts(batch_size)
        for num_adapters in counts:
            yield partial(closed_loop, engine, work, Arm.LORA, batch_size, used[:num_adapters], work.kind)
        yield partial(profile_steps, engine, work, Arm.LORA, batch_size, used[: counts[-1]])
    for prompts in work.prefills:
        yield partial(prefill, engine, work, Arm.LORA, prompts, used)
    # From here on others are displaced from the host's memory.
    yield partial(cold_start, engine, work, FROM_FILE, used[0], in_file)
    remove_adapters(engine, digests, folder / "adapters")
    for kind in work.other_kinds:
        yield partial(_other_kind, engine, config, work, kind, folder / "other-adapters")


def _other_kind(engine: Engine, config: LlamaConfig, work: Work, kind: AdapterKind, folder: Path) -> list[Record]:
    digests = add_adapters(engine, config, kind, folder, kind.num_adapters)
    records = closed_loop(engine, work, Arm.LORA, work.max_adapters, digests, kind)
    remove_adapters(engine, digests, folder)
    return records


def _free_memory(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _in_memory(size_bytes: int) -> Path | None:
    """A folder on no disk, with so much room; None where there is none."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and shutil.disk_usage(folder).free > size_bytes else None


def main() -> None:
    args = argument_parser(__doc__, budget_s=180).parse_args()
    require_cuda()
    end = time.monotonic() + args.budget_s
    config, work = llama_8b(), Work()
    with tempfile.TemporaryDirectory(dir=_in_memory(folder_bytes(config, work))) as folder:
        try:
            keep(measure(config, work, Path(folder), "cuda", end), args.json)
        except EngineStartError as error:
            sys.exit(f"The engine does not start on this GPU: {error}")


if __name__ == "__main__":
    main()

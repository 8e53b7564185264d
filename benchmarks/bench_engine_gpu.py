"""The engine on a GPU without HTTP: an 8-billion-parameter Llama's shapes with random weights.

T1: decode of B requests at once, 128 tokens in and out, with D distinct adapters of rank 16 on all linears; D = 0 in
turns with an engine that has no LoRA. Also other ranks, adapters on attention's linears alone, and small ranks with
one adapter per request in large batches.
T3: the time that an adapter on the host, in the page cache or on disk adds to the first token, and the time its bytes
alone take; the time that loading it adds between other requests' tokens.
T5: where the time of a decode step goes.
Also prompts with and without adapters, and the floors of all decode steps.

Run: PYTHONPATH=.:kernels:adapters python benchmarks/bench_engine_gpu.py
"""

import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from gpu.decode import Side, closed_loops, profile_steps
from gpu.engine import add_adapters, arena_bytes, folder_bytes, remove_adapters, start_engine
from gpu.first_token import (
    FROM_DISK,
    FROM_FILE,
    FROM_HOST,
    cold_start,
    drop_pages,
    file_reads,
    prefills,
    read_pages,
    use_once,
)
from gpu.floor import machine_records
from gpu.llama import adapter_bytes, llama_8b
from gpu.part import argument_parser
from gpu.record import TIME_OVER, Arm, LeftOut, Record, keep
from gpu.timing import require_cuda
from gpu.token_gaps import while_adapters_load
from gpu.work import AdapterKind, Work
from transformers import LlamaConfig

from loraserve.engine.engine import Engine
from loraserve.engine.errors import EngineStartError

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that are not on a disk."""


@dataclass(frozen=True, slots=True)
class Measurement:
    what: str
    run: Callable[[], list[Record]]


def measure(
    config: LlamaConfig, work: Work, folder: Path, device: str, end: float, disk: Path | None = None
) -> Iterator[Record | LeftOut]:
    """Starts no measurement once `end` (of `time.monotonic`) is past. Raises `EngineStartError`.

    disk: a folder for the adapters that are measured from their files; None = `folder`.
    """
    torch.manual_seed(work.seed)
    yield from machine_records(config, work, device)
    _free_memory(device)
    if time.monotonic() > end:
        yield LeftOut("the engines", TIME_OVER)
        return
    for measurement in _measurements(config, work, folder, disk or folder, device):
        if isinstance(measurement, LeftOut):
            yield measurement
        elif time.monotonic() > end:
            yield LeftOut(f"{measurement.what}, and what comes after it", TIME_OVER)
            return
        else:
            yield from measurement.run()


def _measurements(
    config: LlamaConfig, work: Work, folder: Path, disk: Path, device: str
) -> Iterator[Measurement | LeftOut]:
    """Both engines stay loaded, so that they can take turns in measurements that compare them."""
    base = Side(start_engine(config, work, folder / "model", device, enable_lora=False), Arm.NO_LORA, [])
    engine = start_engine(config, work, folder / "model", device, enable_lora=True)
    num_cold = work.num_cold_adapters
    digests = list(add_adapters(engine, config, work.kind, folder / "adapters", num_cold + work.max_adapters))
    on_host, used = digests[:num_cold], digests[num_cold:]
    use_once(engine, work, digests)
    yield Measurement("adapters on the host", partial(cold_start, engine, work, FROM_HOST, used[-1], on_host))
    yield Measurement("decodes while adapters load", partial(while_adapters_load, engine, work, digests[::-1]))
    for batch_size in work.batch_sizes:
        yield from _decode(base, engine, config, work, batch_size, used)
    for prompts in work.prefills:
        sides = [base, Side(engine, Arm.LORA, used)]
        yield Measurement(f"{prompts.batch_size} prompts", partial(prefills, sides, work, prompts))
    # From here on, new adapters displace others from the host's memory.
    yield from _from_files(engine, config, work, used[0], disk / "on-disk", len(digests))
    remove_adapters(engine, digests, folder / "adapters")
    for kind in work.other_kinds:
        if kind.num_adapters * adapter_bytes(config, kind) > arena_bytes(config, work):
            yield _too_large(config, work, kind, kind.num_adapters)
        else:
            run = partial(_other_kind, engine, config, work, kind, folder / "other-adapters")
            yield Measurement(f"adapters {kind.name}", run)


def _decode(
    base: Side, engine: Engine, config: LlamaConfig, work: Work, batch_size: int, used: Sequence[str]
) -> Iterator[Measurement | LeftOut]:
    counts = work.adapter_counts(batch_size)
    for count in counts:
        with_lora = Side(engine, Arm.LORA, used[:count])
        sides = [with_lora] if count else [base, with_lora]
        run = partial(closed_loops, sides, work, batch_size, work.kind)
        yield Measurement(f"decode of {batch_size} with {count} adapters", run)
    run = partial(profile_steps, engine, work, Arm.LORA, batch_size, used[: counts[-1]])
    yield Measurement(f"profile of {batch_size}", run)
    if batch_size > work.max_adapters:
        yield _too_large(config, work, work.kind, batch_size)


def _from_files(
    engine: Engine, config: LlamaConfig, work: Work, used: str, folder: Path, first: int
) -> Iterator[Measurement | LeftOut]:
    """The first measurement creates the files, if there is time for it. first: as in `add_adapters`."""
    in_file: dict[str, Path] = {}

    def make_and_read() -> list[Record]:
        in_file.update(add_adapters(engine, config, work.kind, folder, 2 * work.num_cold_adapters, first))
        return file_reads(work, next(iter(in_file.values())))

    def read(digest: str) -> None:
        read_pages(in_file[digest])

    def drop(digest: str) -> None:
        drop_pages(in_file[digest])

    yield Measurement("a file's reads", make_and_read)
    digests, num_cold = list(in_file), work.num_cold_adapters
    in_cache, on_disk = digests[:num_cold], digests[num_cold:]
    yield Measurement("adapters in the page cache", partial(cold_start, engine, work, FROM_FILE, used, in_cache, read))
    if file_system(folder) in IN_MEMORY:
        yield LeftOut("adapters on disk", f"{folder} is on no disk")
    else:
        yield Measurement("adapters on disk", partial(cold_start, engine, work, FROM_DISK, used, on_disk, drop))
    remove_adapters(engine, in_file, folder)


def _too_large(config: LlamaConfig, work: Work, kind: AdapterKind, count: int) -> LeftOut:
    size, arena = count * adapter_bytes(config, kind) / 1e9, arena_bytes(config, work) / 1e9
    what = f"decode with {count} adapters {kind.name}"
    return LeftOut(what, f"they take {size:.3g} GB, the engine is started with {arena:.3g} GB for adapters")


def _other_kind(engine: Engine, config: LlamaConfig, work: Work, kind: AdapterKind, folder: Path) -> list[Record]:
    digests = list(add_adapters(engine, config, kind, folder, kind.num_adapters))
    records = []
    for size in work.batch_sizes_of(kind):
        side = Side(engine, Arm.LORA, digests[: kind.num_of_batch(size)])
        records += closed_loops([side], work, size, kind)
    remove_adapters(engine, digests, folder)
    return records


def _free_memory(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _in_memory(size_bytes: int) -> Path | None:
    """A folder in memory with this much room; None if there is none."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and shutil.disk_usage(folder).free > size_bytes else None


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Type of the file system that holds `path`; empty if unknown."""
    if not mounts.exists():
        return ""
    found = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    holding = [(len(point), kind) for point, kind in found if path.resolve().is_relative_to(point)]
    return max(holding, key=lambda each: each[0])[1] if holding else ""


def main() -> None:
    parser = argument_parser(__doc__, budget_s=180)
    parser.add_argument("--disk", type=Path, help="a folder for adapters on disk; default: the temporary folder")
    args = parser.parse_args()
    require_cuda()
    end = time.monotonic() + args.budget_s
    config, work = llama_8b(), Work()
    in_memory = tempfile.TemporaryDirectory(dir=_in_memory(folder_bytes(config, work)))
    with in_memory as folder, tempfile.TemporaryDirectory(dir=args.disk) as disk:
        try:
            keep(measure(config, work, Path(folder), "cuda", end, Path(disk)), args.json, work.seed)
        except EngineStartError as error:
            sys.exit(f"The engine does not start on this GPU: {error}")


if __name__ == "__main__":
    main()

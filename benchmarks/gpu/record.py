"""Measurements of the engine and of its rivals on a GPU, and the file that `gpu_suite.py` collects them from."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from gpu.part import write_json
from gpu.work import RANK_16

TIME_OVER = "the time was over"
"""`LeftOut.why` for measurements that a longer run would make."""


class Arm(StrEnum):
    NO_LORA = "no lora"
    """Our engine, started without LoRA."""
    LORA = "lora"
    """Our engine, started with LoRA; with 0 adapters, base model requests on it."""
    FLOOR = "floor"
    """The bytes of a step divided by the larger of the bandwidths that this run measured."""
    TRANSFORMERS = "transformers"
    PEFT = "peft"
    MACHINE = "machine"


class Figure(StrEnum):
    DECODE_STEP = "decode step ms"
    OUTPUT = "output tokens/s"
    PREFILL = "prefill ms"
    """From the arrival of all requests until each has its first token."""
    FIRST_TOKEN = "first token, adapter on the GPU ms"
    FROM_DISK = "first token, adapter on disk ms"
    """Its file's pages were dropped from the page cache."""
    FROM_DISK_ADDS = "an adapter on disk adds ms"
    """Compared with the time to first token with the same adapter once it is on the GPU."""
    FROM_FILE = "first token, adapter in page cache ms"
    FROM_FILE_ADDS = "an adapter in the page cache adds ms"
    FROM_HOST = "first token, adapter on the host ms"
    FROM_HOST_ADDS = "an adapter on the host adds ms"
    GAP_LOADING = "token gap p99, an adapter loads ms"
    """For decodes during which a request of `prompt_tokens` arrives, with its adapter on the host."""
    GAP_LOADED = "token gap p99, it is on the GPU ms"
    """The same, with the request's adapter on the GPU."""
    PROFILED_STEP = "profiled step ms"
    HOST = "host ms a step"
    """Without its waits for the GPU."""
    GPU_BUSY = "GPU busy ms a step"
    GPU_WAITS = "GPU waits for the host ms a step"
    """Mean over the steps."""
    GPU_WAITS_P50 = "GPU waits for the host ms p50"
    """Median over the steps."""
    UPLOADS = "copies to the GPU a step"
    LAUNCHES = "kernels and copies a step"
    COPY_BANDWIDTH = "copy GB/s"
    READ_BANDWIDTH = "read GB/s"
    ADAPTER_BYTES = "bytes of one adapter"
    ADAPTER_COPY = "copy of one adapter to the GPU ms"
    FILE_READ = "its file read from the page cache ms"
    DISK_READ = "its file read from disk ms"


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement; its numbers are zero if it belongs to no batch."""

    arm: Arm
    figure: Figure
    batch_size: int
    num_adapters: int
    """Distinct ones in the batch."""
    prompt_tokens: int
    """Per request, like `output_tokens`."""
    output_tokens: int
    value: float
    """In the unit that the figure names; the median if there are several values."""
    adapters: str = RANK_16.name
    """Name of the `AdapterKind`."""
    p10: float | None = None
    p90: float | None = None
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What was not measured, and why."""

    what: str
    why: str


def spread(arm: Arm, figure: Figure, about: tuple[int, int, int, int], values: Sequence[float]) -> Record:
    """The median of the repeats with p10 and p90, which a single value does not have."""
    deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else None
    p10, p90 = (deciles[0], deciles[-1]) if deciles else (None, None)
    return Record(arm, figure, *about, statistics.median(values), p10=p10, p90=p90, repeats=len(values))


def keep(records: Iterable[Record | LeftOut], path: Path | None, seed: int | None = None) -> None:
    """Print each, and write all after each, so that a run that is cut short keeps what it measured.

    Measurements left out because the time was over are also in the file's `not_run`, which makes the suite's run
    incomplete.
    """
    kept, left_out, not_run = [], [], []
    for record in records:
        if isinstance(record, LeftOut):
            left_out.append(asdict(record))
            not_run += [record.what] if record.why == TIME_OVER else []
            print(f"left out: {record.what}: {record.why}", flush=True)
        else:
            kept.append(asdict(record))
            _print(record)
        if path:
            write_json(path, {"seed": seed, "results": kept, "left_out": left_out, "not_run": not_run})


def _print(record: Record) -> None:
    print(
        f"{record.arm:12} B{record.batch_size:<3} D{record.num_adapters:<3} {record.adapters:11} "
        f"{record.prompt_tokens:5} in {record.output_tokens:4} out  {record.figure:36} {record.value:10.3f}",
        flush=True,
    )

"""Measurements of the engine and of its rivals on a GPU, and the file that `gpu_suite.py` collects them from."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from gpu.part import write_json
from gpu.work import RANK_16


class Arm(StrEnum):
    NO_LORA = "no lora"
    """Our engine, started without LoRA."""
    LORA = "lora"
    """Our engine, started with LoRA; with 0 adapters, base model requests on it."""
    FLOOR = "floor"
    """The bytes of a step over the larger of the bandwidths that this run measured."""
    TRANSFORMERS = "transformers"
    PEFT = "peft"
    MACHINE = "machine"


class Figure(StrEnum):
    DECODE_STEP = "decode step ms"
    DECODE_STEP_P90 = "decode step p90 ms"
    OUTPUT = "output tokens/s"
    PREFILL = "prefill ms"
    """From the arrival of all requests until each has its first token."""
    FROM_FILE = "first token, adapter in its file ms"
    FROM_FILE_ADDS = "an adapter in its file adds ms"
    """To the time to the first token with the same adapter once it is on the GPU."""
    FROM_HOST = "first token, adapter on the host ms"
    FROM_HOST_ADDS = "an adapter on the host adds ms"
    PROFILED_STEP = "profiled step ms"
    HOST = "host ms a step"
    """In which it does not wait for the GPU."""
    GPU_BUSY = "GPU busy ms a step"
    GPU_WAITS = "GPU waits for the host ms a step"
    UPLOADS = "copies to the GPU a step"
    LAUNCHES = "kernels and copies a step"
    COPY_BANDWIDTH = "copy GB/s"
    READ_BANDWIDTH = "read GB/s"
    ADAPTER_COPY = "copy of one adapter to the GPU ms"


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement; zeros where it is of no batch."""

    arm: Arm
    figure: Figure
    batch_size: int
    num_adapters: int
    """Distinct ones of the batch."""
    prompt_tokens: int
    """Of each request, as `output_tokens`."""
    output_tokens: int
    value: float
    """In the unit that the figure names."""
    adapters: str = RANK_16.name
    """Which of the `AdapterKind`s."""


def keep(records: Iterable[Record], path: Path | None) -> None:
    """Print each, and write all after each, so that a run that is cut short keeps what it measured."""
    kept = []
    for record in records:
        kept.append(asdict(record))
        print(
            f"{record.arm:12} B{record.batch_size:<3} D{record.num_adapters:<3} {record.adapters:11} "
            f"{record.prompt_tokens:5} in {record.output_tokens:4} out  {record.figure:36} {record.value:10.3f}",
            flush=True,
        )
        if path:
            write_json(path, {"results": kept})

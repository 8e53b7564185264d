"""The time that no decode step can beat: its bytes divided by this run's bandwidth."""

import torch
from gpu.llama import adapter_bytes, kv_bytes_per_token, read_weight_bytes
from gpu.record import Arm, Figure, Record
from gpu.timing import copy_bytes_per_s, median_us, read_bytes_per_s
from gpu.work import AdapterKind, Work
from transformers import LlamaConfig


def machine_records(config: LlamaConfig, work: Work, device: str) -> list[Record]:
    """Bandwidths, an adapter's copy to the device with nothing else running, and the floors of all decode steps."""
    copy, read = copy_bytes_per_s(device, work.probe_bytes), read_bytes_per_s(device, work.probe_bytes)
    copy_ms = host_copy_us(int(adapter_bytes(config, work.kind)), device) / 1e3
    return [
        Record(Arm.MACHINE, Figure.COPY_BANDWIDTH, 0, 0, 0, 0, copy / 1e9),
        Record(Arm.MACHINE, Figure.READ_BANDWIDTH, 0, 0, 0, 0, read / 1e9),
        Record(Arm.MACHINE, Figure.ADAPTER_BYTES, 0, 1, 0, 0, adapter_bytes(config, work.kind)),
        Record(Arm.MACHINE, Figure.ADAPTER_COPY, 0, 1, 0, 0, copy_ms),
        *floor_records(config, work, max(copy, read)),
    ]


def floor_records(config: LlamaConfig, work: Work, bytes_per_s: float) -> list[Record]:
    weights, kv = read_weight_bytes(config), work.mean_context * kv_bytes_per_token(config)

    def record(batch_size: int, num_adapters: int, kind: AdapterKind) -> Record:
        step_bytes = weights + batch_size * kv + num_adapters * adapter_bytes(config, kind)
        about = (batch_size, num_adapters, work.num_tokens, work.num_tokens)
        return Record(Arm.FLOOR, Figure.DECODE_STEP, *about, step_bytes / bytes_per_s * 1e3, kind.name)

    return [
        *(record(size, count, work.kind) for size in work.batch_sizes for count in work.adapter_counts(size)),
        *(
            record(size, kind.num_of_batch(size), kind)
            for kind in work.other_kinds
            for size in work.batch_sizes_of(kind)
        ),
    ]


def host_copy_us(size_bytes: int, device: str) -> float:
    """Copy to the device, from page-locked memory in one piece."""
    source = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    target = torch.empty_like(source, device=device)
    return median_us(lambda: target.copy_(source, non_blocking=True), device)

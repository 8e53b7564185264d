"""µs and GB/s of `lora_embed` on a GPU, compared with the byte floor and with one lookup and product per adapter.

Run: PYTHONPATH=kernels python benchmarks/bench_lora_embed.py
"""

from collections.abc import Iterator

import torch
from gpu.kernel_bench import Case, run_bench
from gpu.lora import Workload
from gpu.timing import Call
from loraserve_kernels.lora_add import LoraInputs, matrix
from torch import Tensor

WORKLOADS = [
    Workload("embedding", num_rows, num_adapters, (16,))
    for num_rows, num_adapters in ((64, 64), (1, 1), (64, 1), (512, 8))
]


def make(workload: Workload, seed: int) -> tuple[LoraInputs, Tensor]:
    inputs = workload.make(seed)
    return inputs, torch.randint(inputs.group.in_features, (workload.num_rows,), device="cuda")


def triton_call(workload: Workload, seed: int) -> Call:
    from loraserve_kernels.triton_ops.lora_embed import lora_embed

    inputs, token_ids = make(workload, seed)
    tiles = inputs.segments.tiles
    assert tiles is not None
    return lambda: lora_embed(inputs.y, token_ids, 1.0, inputs.group, inputs.table, tiles)


def torch_call(workload: Workload, seed: int) -> Call:
    inputs, token_ids = make(workload, seed)
    table, products = inputs.table, []
    offsets = zip(table.offset_a[:, 0].tolist(), table.offset_b[:, 0].tolist(), strict=True)
    rows = zip(inputs.y.split(workload.segment_rows), token_ids.split(workload.segment_rows), strict=True)
    for (y, ids), (offset_a, offset_b), lora_rank in zip(rows, offsets, workload.rank_of_adapters, strict=True):
        a = matrix(table, offset_a, lora_rank, inputs.group.in_features)
        products.append((y, a, ids, matrix(table, offset_b, lora_rank, y.shape[1])))
    return lambda: [y.addmm_(a.index_select(1, ids).T, b) for y, a, ids, b in products]


def cases() -> Iterator[Case]:
    for arm, make_call in (("triton", triton_call), ("torch loop", torch_call)):
        for workload in WORKLOADS:
            hidden_size = workload.features[1]
            size_bytes = workload.num_rows * (8 + 4 * hidden_size) + 2 * workload.hidden_elements()
            size_bytes += 2 * sum(workload.rank_of_adapters) * hidden_size
            yield Case(
                workload.name,
                arm,
                lambda seed, w=workload, make_call=make_call: make_call(w, seed),
                size_bytes,
                workload.expand_flops(),
            )


if __name__ == "__main__":
    run_bench("lora_embed", cases)

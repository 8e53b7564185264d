"""µs and GB/s of `lora_shrink` on a GPU, compared with the byte floor and with one matrix product per adapter.

Run: PYTHONPATH=kernels python benchmarks/bench_lora_shrink.py
"""

from collections.abc import Iterator

from gpu.kernel_bench import Case, run_bench
from gpu.lora import Workload, workloads
from gpu.timing import Call
from loraserve_kernels.lora_add import matrix


def triton_call(workload: Workload, seed: int) -> Call:
    from loraserve_kernels.triton_ops.lora_shrink import lora_shrink

    inputs = workload.make(seed)
    tiles = inputs.segments.tiles
    assert tiles is not None
    return lambda: lora_shrink(inputs.x, inputs.group, inputs.table, tiles)


def torch_call(workload: Workload, seed: int) -> Call:
    inputs = workload.make(seed)
    num_members, features = len(inputs.group.out_features), inputs.group.in_features
    offsets = inputs.table.offset_a[:, 0].tolist()
    pairs = [
        (rows, matrix(inputs.table, offset, lora_rank * num_members, features).T)
        for rows, offset, lora_rank in zip(
            inputs.x.split(workload.segment_rows), offsets, workload.rank_of_adapters, strict=True
        )
    ]
    return lambda: [rows @ a for rows, a in pairs]


def cases() -> Iterator[Case]:
    for arm, make in (("triton", triton_call), ("torch loop", torch_call)):
        for workload in workloads():
            if arm == "triton" or workload.num_adapters <= 16:
                yield Case(
                    workload.name,
                    arm,
                    lambda seed, w=workload, make=make: make(w, seed),
                    workload.shrink_bytes(),
                    workload.shrink_flops(),
                )


if __name__ == "__main__":
    run_bench("lora_shrink", cases)

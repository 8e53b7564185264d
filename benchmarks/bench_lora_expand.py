"""µs and GB/s of `lora_expand` on a GPU, compared with the byte floor and with one product per adapter and member.

Run: PYTHONPATH=kernels python benchmarks/bench_lora_expand.py
"""

from collections.abc import Iterator

from gpu.kernel_bench import Case, run_bench
from gpu.lora import Workload, workloads
from gpu.timing import Call
from loraserve_kernels.lora_add import matrix


def triton_call(workload: Workload, seed: int) -> Call:
    from loraserve_kernels.triton_ops.lora_expand import lora_expand
    from loraserve_kernels.triton_ops.lora_shrink import lora_shrink

    inputs = workload.make(seed)
    tiles = inputs.segments.tiles
    assert tiles is not None
    hidden = lora_shrink(inputs.x, inputs.group, inputs.table, tiles)
    return lambda: lora_expand(inputs.y, hidden, inputs.group, inputs.table, tiles)


def torch_call(workload: Workload, seed: int) -> Call:
    inputs = workload.make(seed)
    products = []
    offsets = inputs.table.offset_b.tolist()
    segments = inputs.y.split(workload.segment_rows)
    for y, slot_offsets, lora_rank in zip(segments, offsets, workload.rank_of_adapters, strict=True):
        hidden = inputs.x[: y.shape[0], :lora_rank]
        for out, offset in zip(y.split(inputs.group.out_features, dim=1), slot_offsets, strict=True):
            products.append((out, hidden, matrix(inputs.table, offset, lora_rank, out.shape[1])))
    return lambda: [out.addmm_(hidden, b) for out, hidden, b in products]


def cases() -> Iterator[Case]:
    for arm, make in (("triton", triton_call), ("torch loop", torch_call)):
        for workload in workloads():
            if arm == "triton" or workload.num_adapters <= 16:
                yield Case(
                    workload.name,
                    arm,
                    lambda seed, w=workload, make=make: make(w, seed),
                    workload.expand_bytes(),
                    workload.expand_flops(),
                )


if __name__ == "__main__":
    run_bench("lora_expand", cases)

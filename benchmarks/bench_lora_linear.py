"""µs of a linear alone, its LoRA alone, and both, on a GPU: the time that LoRA adds where it runs, after the linear.

*overlapped* is both, with `lora_shrink`, which needs only the linear's input, on a second stream in parallel with the
linear. The engine does not do this; the arm shows the possible gain.

Run: PYTHONPATH=kernels python benchmarks/bench_lora_linear.py
"""

from collections.abc import Iterator

import torch
from gpu.kernel_bench import Case, run_bench
from gpu.lora import DTYPE, Workload, workloads
from gpu.timing import Call


def make_call(workload: Workload, seed: int, *, has_linear: bool, has_lora: bool) -> Call:
    from loraserve_kernels.triton_backend import TritonBackend

    inputs, backend = workload.make(seed), TritonBackend()
    shape = (sum(inputs.group.out_features), inputs.group.in_features) if has_linear else (0, 0)
    weight = torch.randn(shape, device="cuda", dtype=DTYPE)

    def call() -> None:
        y = torch.nn.functional.linear(inputs.x, weight) if has_linear else inputs.y
        if has_lora:
            backend.lora_add(y, inputs.x, inputs.group, inputs.table, inputs.segments)

    return call


def make_overlapped(workload: Workload, seed: int) -> Call:
    """Both, with the linear and `lora_shrink` on separate streams."""
    from loraserve_kernels.triton_ops.lora_expand import lora_expand
    from loraserve_kernels.triton_ops.lora_shrink import lora_shrink

    inputs, side = workload.make(seed), torch.cuda.Stream()
    tiles = inputs.segments.tiles
    assert tiles is not None
    weight = torch.randn(sum(inputs.group.out_features), inputs.group.in_features, device="cuda", dtype=DTYPE)

    def call() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            hidden = lora_shrink(inputs.x, inputs.group, inputs.table, tiles)
        y = torch.nn.functional.linear(inputs.x, weight)
        main.wait_stream(side)
        lora_expand(y, hidden, inputs.group, inputs.table, tiles)

    return call


def cases() -> Iterator[Case]:
    for workload in workloads():
        lora_bytes = workload.shrink_bytes() + workload.expand_bytes()
        lora_flops = workload.shrink_flops() + workload.expand_flops()
        x_elements, y_elements = (workload.num_rows * n for n in workload.features)
        linear_bytes = workload.weight_bytes() + 2 * (x_elements + y_elements)
        linear_flops = workload.num_rows * workload.weight_bytes()
        for arm, has_linear, has_lora in (("linear", True, False), ("lora", False, True), ("both", True, True)):
            yield Case(
                workload.name,
                arm,
                lambda seed, w=workload, has_linear=has_linear, has_lora=has_lora: make_call(
                    w, seed, has_linear=has_linear, has_lora=has_lora
                ),
                has_linear * linear_bytes + has_lora * lora_bytes,
                has_linear * linear_flops + has_lora * lora_flops,
            )
        yield Case(
            workload.name,
            "overlapped",
            lambda seed, w=workload: make_overlapped(w, seed),
            linear_bytes + lora_bytes,
            linear_flops + lora_flops,
        )


if __name__ == "__main__":
    run_bench("lora_linear", cases)

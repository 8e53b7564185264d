"""µs and GFLOP/s of `selective_scan`, compared with copying its states once and with the reference backend.

States are updated in place, which may be faster than a copy: that also reads the memory it writes.

Run: PYTHONPATH=kernels python benchmarks/bench_selective_scan.py
"""

import math

import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.recurrent import make_recurrent_step
from loraserve_kernels.reference_backend import ReferenceBackend
from loraserve_kernels.selective_scan import SelectiveScanInputs, make_selective_scan_inputs
from timing import copies_beyond_cache, copy_us, least_us

NUM_HEADS, NUM_GROUPS, HEAD_DIM, STATE_DIM = 48, 1, 64, 128
CASES = [
    # name, num_rows
    *((f"decode {num_sequences}", [1] * num_sequences) for num_sequences in (1, 16, 64)),
    ("prompt of 1024", [1024]),
    ("prompt of 512 + 15 decode", [512] + [1] * 15),
]
FLOPS = 5
"""Per element of a state and row: its decay, and two products with sums."""


def make(num_rows: list[int], seed: int) -> SelectiveScanInputs:
    """Sequences that continue and keep their slots, as those of an engine do."""
    inputs = make_selective_scan_inputs(num_rows, NUM_HEADS, NUM_GROUPS, HEAD_DIM, STATE_DIM, torch.bfloat16, seed=seed)
    slots = list(range(len(num_rows)))
    inputs.batch = make_recurrent_step(num_rows, slots, slots, [-1] * len(slots))
    inputs.state = torch.randn(len(num_rows), *inputs.state.shape[1:])
    return inputs


def scan_us(backend: Backend, cases: list[SelectiveScanInputs]) -> float:
    """Time of one call, cycling over the cases."""
    return least_us(
        [
            lambda c=c: backend.selective_scan(
                c.x,
                c.dt,
                c.a,
                c.b,
                c.c,
                c.d,
                c.dt_bias,
                c.state,
                c.batch,
                softplus=True,
                dt_limit=(0.0, math.inf),
            )
            for c in cases
        ]
    )


def main() -> None:
    """Print one line per case."""
    backend, reason = choose_backend("cpu")
    shape = f"{NUM_HEADS} heads of {HEAD_DIM} x {STATE_DIM}"
    print(f"{reason}; {torch.get_num_threads()} threads; {shape}, bfloat16")
    print(f"{'case':28} {'us':>8} {'copy us':>8} {'ratio':>6} {'GFLOP/s':>8} {'reference us':>12} {'ratio':>6}")
    for name, num_rows in CASES:
        elements = NUM_HEADS * HEAD_DIM * STATE_DIM
        size_bytes = 4 * len(num_rows) * elements
        copies = copies_beyond_cache(size_bytes)
        cases = [make(num_rows, seed) for seed in range(copies)]
        ours, reference = scan_us(backend, cases), scan_us(ReferenceBackend(), cases[:1])
        floor, flops = copy_us(size_bytes, copies), FLOPS * sum(num_rows) * elements
        over_floor = f"{floor:8.0f} {ours / floor:6.2f}" if max(num_rows) == 1 else f"{'':15}"
        print(f"{name:28} {ours:8.0f} {over_floor} {flops / ours / 1e3:8.0f} {reference:12.0f} {reference / ours:6.1f}")


if __name__ == "__main__":
    main()

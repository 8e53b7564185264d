"""µs and GFLOP/s of `gated_delta_rule`, compared with copying its states once and with the reference backend.

States are updated in place, which may be faster than a copy: that also reads the memory it writes.

Run: PYTHONPATH=kernels python benchmarks/bench_gated_delta_rule.py
"""

import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.gated_delta_rule import GatedDeltaRuleInputs, make_gated_delta_rule_inputs
from loraserve_kernels.recurrent import make_recurrent_step
from loraserve_kernels.reference_backend import ReferenceBackend
from timing import copies_beyond_cache, copy_us, least_us

NUM_HEADS, DIM = 16, 128
CASES = [
    # name, num_rows
    *((f"decode {num_sequences}", [1] * num_sequences) for num_sequences in (1, 16, 64)),
    ("prompt of 1024", [1024]),
    ("prompt of 512 + 15 decode", [512] + [1] * 15),
]
FLOPS = 7
"""Per element of a state and row: its decay, and three products with sums."""


def make(num_rows: list[int], seed: int) -> GatedDeltaRuleInputs:
    """Sequences that continue and keep their slots, as those of an engine do."""
    inputs = make_gated_delta_rule_inputs(num_rows, NUM_HEADS, NUM_HEADS, DIM, DIM, torch.bfloat16, seed=seed)
    slots = list(range(len(num_rows)))
    inputs.batch = make_recurrent_step(num_rows, slots, slots, [-1] * len(slots))
    inputs.state = torch.randn(len(num_rows), *inputs.state.shape[1:])
    return inputs


def delta_us(backend: Backend, cases: list[GatedDeltaRuleInputs]) -> float:
    """Time of one call, cycling over the cases."""
    return least_us(
        [
            lambda c=c: backend.gated_delta_rule(c.q, c.k, c.v, c.log_decay, c.beta, c.state, c.batch, normalize=True)
            for c in cases
        ]
    )


def main() -> None:
    """Print one line per case."""
    backend, reason = choose_backend("cpu")
    print(f"{reason}; {torch.get_num_threads()} threads; {NUM_HEADS} heads of {DIM} x {DIM}, bfloat16")
    print(f"{'case':28} {'us':>8} {'copy us':>8} {'ratio':>6} {'GFLOP/s':>8} {'reference us':>12} {'ratio':>6}")
    for name, num_rows in CASES:
        elements = NUM_HEADS * DIM * DIM
        size_bytes = 4 * len(num_rows) * elements
        copies = copies_beyond_cache(size_bytes)
        cases = [make(num_rows, seed) for seed in range(copies)]
        ours, reference = delta_us(backend, cases), delta_us(ReferenceBackend(), cases[:1])
        floor, flops = copy_us(size_bytes, copies), FLOPS * sum(num_rows) * elements
        over_floor = f"{floor:8.0f} {ours / floor:6.2f}" if max(num_rows) == 1 else f"{'':15}"
        print(f"{name:28} {ours:8.0f} {over_floor} {flops / ours / 1e3:8.0f} {reference:12.0f} {reference / ours:6.1f}")


if __name__ == "__main__":
    main()

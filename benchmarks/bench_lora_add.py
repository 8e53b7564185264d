"""µs and GB/s of `lora_add`, compared with a plain read of the same adapter bytes and with the reference backend.

Run: PYTHONPATH=kernels python benchmarks/bench_lora_add.py
"""

import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.lora_add import LoraInputs, make_lora_inputs, make_popularity
from loraserve_kernels.reference_backend import ReferenceBackend
from timing import copies_beyond_cache, least_us, read_us

IN_FEATURES, OUT_FEATURES = 768, (2048, 2048)
CASES = [
    # name (ends with DoRA if all members have it), (segment rows, adapter slots), rank
    *((f"decode 16 rows {name} r16", make_popularity(name, 16, 16), 16) for name in ("distinct", "zipf", "identical")),
    ("decode 16 rows distinct r16 DoRA", make_popularity("distinct", 16, 16), 16),
    ("decode 16 rows distinct r64", make_popularity("distinct", 16, 16), 64),
    ("decode 1 row r16", ([1], [0]), 16),
    ("prefill 256 rows r16", ([256], [0]), 16),
    ("prefill 1024 rows r16", ([1024], [0]), 16),
    ("prefill 1024 rows r16 DoRA", ([1024], [0]), 16),
    ("prefill 1024 rows r64", ([1024], [0]), 64),
    ("prefill 512 + 15 decode r16", ([512] + [1] * 15, list(range(16))), 16),
]


def lora_us(backend: Backend, cases: list[LoraInputs]) -> float:
    """Time of one call, cycling over the cases."""
    return least_us([lambda c=c: backend.lora_add(c.y, c.x, c.group, c.table, c.segments) for c in cases])


def main() -> None:
    """Print one line per case."""
    backend, reason = choose_backend("cpu")
    print(f"{reason}; {torch.get_num_threads()} threads; {IN_FEATURES} -> {OUT_FEATURES}, bfloat16")
    print(f"{'case':32} {'us':>8} {'GB/s':>6} {'read us':>8} {'reference us':>12} {'ratio':>6}")
    for name, (rows, slots), rank in CASES:
        ranks = [(rank,) * len(OUT_FEATURES)] * (max(slots) + 1)
        dora_slots = slots if name.endswith("DoRA") else []
        dora = [(slot, member) for slot in dora_slots for member in range(len(OUT_FEATURES))]
        size_bytes = 2 * rank * len(slots) * (len(OUT_FEATURES) * IN_FEATURES + sum(OUT_FEATURES))
        size_bytes += 8 * len(dora_slots) * sum(OUT_FEATURES)
        copies = copies_beyond_cache(size_bytes)
        cases = [
            make_lora_inputs(rows, slots, ranks, IN_FEATURES, OUT_FEATURES, torch.bfloat16, seed=seed, dora=dora)
            for seed in range(copies)
        ]
        ours, reference = lora_us(backend, cases), lora_us(ReferenceBackend(), cases)
        read = read_us(size_bytes, copies)
        gigabytes_per_s = size_bytes / ours / 1e3
        print(f"{name:32} {ours:8.0f} {gigabytes_per_s:6.1f} {read:8.0f} {reference:12.0f} {reference / ours:6.1f}")


if __name__ == "__main__":
    main()

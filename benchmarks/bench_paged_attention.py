"""µs, GB/s and GFLOP/s of `paged_attention`, compared with a plain read of its K and V and with the reference backend.

Run: PYTHONPATH=kernels python benchmarks/bench_paged_attention.py
"""

import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.paged_attention import AttentionInputs, make_attention_inputs
from loraserve_kernels.reference_backend import ReferenceBackend
from timing import copies_beyond_cache, least_us, read_us

CASES = [
    # name, context_lens, num_rows, num_heads, num_kv_heads, head_dim
    ("decode 16 x 128", [128] * 16, [1] * 16, 12, 4, 64),
    ("decode 16 x 1024", [1024] * 16, [1] * 16, 12, 4, 64),
    ("decode 16 x 1024, 32/8 heads of 128", [1024] * 16, [1] * 16, 32, 8, 128),
    ("decode 1 x 8192, one kv head", [8192], [1], 8, 1, 128),
    ("prefill 1 x 256", [256], [256], 12, 4, 64),
    ("prefill 1 x 1024", [1024], [1024], 12, 4, 64),
    ("chunk of 256 after 1792 + 15 decode", [2048] + [512] * 15, [256] + [1] * 15, 12, 4, 64),
]


def attention_us(backend: Backend, cases: list[AttentionInputs]) -> float:
    """Time of one call, cycling over the cases."""
    return least_us(
        [lambda c=c: backend.paged_attention(c.q, c.k_cache, c.v_cache, c.batch, scaling=0.125) for c in cases]
    )


def main() -> None:
    """Print one line per case."""
    backend, reason = choose_backend("cpu")
    print(f"{reason}; {torch.get_num_threads()} threads; bfloat16")
    print(f"{'case':36} {'us':>8} {'GB/s':>6} {'GFLOP/s':>8} {'read us':>8} {'reference us':>12} {'ratio':>6}")
    for name, contexts, rows, heads, kv_heads, head_dim in CASES:
        size_bytes = 2 * 2 * sum(contexts) * kv_heads * head_dim
        scores = sum(context * count - count * (count - 1) / 2 for context, count in zip(contexts, rows, strict=True))
        copies = min(4, copies_beyond_cache(size_bytes))
        cases = [
            make_attention_inputs(contexts, rows, heads, kv_heads, head_dim, dtype=torch.bfloat16, seed=seed)
            for seed in range(copies)
        ]
        ours, reference = attention_us(backend, cases), attention_us(ReferenceBackend(), cases)
        read, flops = read_us(size_bytes, copies), 4 * scores * heads * head_dim
        figures = f"{ours:8.0f} {size_bytes / ours / 1e3:6.1f} {flops / ours / 1e3:8.0f} {read:8.0f} {reference:12.0f}"
        print(f"{name:36} {figures} {reference / ours:6.1f}")


if __name__ == "__main__":
    main()

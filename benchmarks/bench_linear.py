"""µs, GFLOP/s and GB/s of a layer's linears, ours compared with torch's and with a plain read of the weights.

Shapes of the benchmarks' model (hidden 768, q|k|v 1280, intermediate 2048); each call uses weights that no cache holds.

Run: PYTHONPATH=kernels python benchmarks/bench_linear.py [--dtype float32]
"""

import argparse
from collections.abc import Callable

import torch
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.linear import Linear
from timing import copies_beyond_cache, least_us, read_us
from torch import Tensor
from torch.nn.functional import linear

SHAPES = [(1280, 768), (768, 768), (4096, 768), (768, 2048)]
"""(outputs, inputs)."""
ROWS = (1, 4, 16, 64, 128, 1024)


def main() -> None:
    """Print one line per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    dtype: torch.dtype = getattr(torch, parser.parse_args().dtype)
    backend, reason = choose_backend("cpu")
    num_weights = sum(outputs * inputs for outputs, inputs in SHAPES)
    size_bytes = num_weights * dtype.itemsize
    copies = copies_beyond_cache(size_bytes, 256 << 20)
    weights = [[torch.randn(shape).to(dtype) * shape[1] ** -0.5 for shape in SHAPES] for _ in range(copies)]
    ours = [[backend.linear(weight, None, keep_weight=False) for weight in layer] for layer in weights]
    read = read_us(size_bytes, copies)
    print(f"{reason}; {torch.get_num_threads()} threads; {dtype}; a plain read of the weights: {read:.0f} us")
    print(f"{'rows':>6} {'us':>8} {'GFLOP/s':>8} {'GB/s':>6} {'torch us':>9} {'ratio':>6}")
    for rows in ROWS:
        inputs = [torch.randn(rows, shape[1]).to(dtype) for shape in SHAPES]
        ours_us = least_us([_layer(layer, inputs) for layer in ours])
        torch_us = least_us([_torch_layer(layer, inputs) for layer in weights])
        gigaflops, gigabytes = 2 * rows * num_weights / ours_us / 1e3, size_bytes / ours_us / 1e3
        print(f"{rows:6} {ours_us:8.0f} {gigaflops:8.0f} {gigabytes:6.1f} {torch_us:9.0f} {torch_us / ours_us:6.1f}")


def _layer(linears: list[Linear], inputs: list[Tensor]) -> Callable[[], object]:
    return lambda: [each(x) for each, x in zip(linears, inputs, strict=True)]


def _torch_layer(weights: list[Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    return lambda: [linear(x, weight) for weight, x in zip(weights, inputs, strict=True)]


if __name__ == "__main__":
    main()

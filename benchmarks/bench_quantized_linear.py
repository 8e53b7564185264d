"""µs of a quantized linear of 4,096 x 4,096 and of the same in bfloat16, with weights that no cache holds.

Run: PYTHONPATH=.:kernels python benchmarks/bench_quantized_linear.py [--forms int4 uint4_g128] [--without-amx]
"""

import argparse
from collections.abc import Callable

import torch
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.four_bit_weight import FourBitWeight
from loraserve_kernels.linear import Linear
from loraserve_kernels.quantization import ROUNDINGS, Quantization
from timing import copies_beyond_cache, least_us
from torch import Tensor

SIZE = 4096
ROWS = (1, 2, 4, 8, 16, 64, 256)


def main() -> None:
    """Print one line per form: the least µs for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=[*Quantization], default=[*Quantization])
    parser.add_argument("--without-amx", action="store_true")
    args = parser.parse_args()
    backend, reason = choose_backend("cpu")
    if not isinstance(backend, CpuBackend):
        parser.error(f"needs the C kernels: {reason}")
    if args.without_amx:
        backend.library.functions.amx_enable(False)
    print(f"{reason}; {torch.get_num_threads()} threads")
    print(f"{'rows':12}" + "".join(f"{rows:8}" for rows in ROWS))
    for form in (None, *map(Quantization, args.forms)):
        bits = 16 if form is None else 8 if form is Quantization.INT8 else 4
        copies = copies_beyond_cache(SIZE * SIZE * bits // 8, 256 << 20)
        linears = [_linear(backend, form) for _ in range(copies)]
        times = [least_us([_call(linear, rows) for linear in linears]) for rows in ROWS]
        print(f"{form or 'bfloat16':12}" + "".join(f"{us:8.0f}" for us in times), flush=True)


def _linear(backend: CpuBackend, form: Quantization | None) -> Linear:
    if form is None or form in ROUNDINGS:
        weight = (torch.randn(SIZE, SIZE) * SIZE**-0.5).bfloat16()
        return backend.linear(weight, None, keep_weight=False, quantization=form)
    num_groups = SIZE // form.group_size(SIZE)
    codes = torch.randint(256, (SIZE, SIZE // 2), dtype=torch.uint8)
    scales = torch.rand(SIZE, num_groups).bfloat16()
    zeros = torch.full((SIZE, num_groups), 8, dtype=torch.uint8) if form.has_zero_points else None
    return backend.four_bit_linear(FourBitWeight(form, codes, scales, zeros), None, torch.bfloat16)


def _call(linear: Linear, rows: int) -> Callable[[], Tensor]:
    x = torch.randn(rows, SIZE).bfloat16()
    return lambda: linear(x)


if __name__ == "__main__":
    main()

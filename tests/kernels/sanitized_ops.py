"""Calls the C functions over shapes that end within a vector, a tile or a block: `python sanitized_ops.py LIBRARY`.

Every tensor is exactly as long as the part that may be read. The library is compiled with the AddressSanitizer, whose
runtime is loaded first and ends the process if more is read.
"""

import os
import sys
from ctypes import c_int64
from dataclasses import replace
from pathlib import Path

import torch
from loraserve_kernels.causal_conv import make_causal_conv_inputs
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import open_prebuilt
from loraserve_kernels.cpu_variants import Variant
from loraserve_kernels.draw import Draw
from loraserve_kernels.gated_delta_rule import make_gated_delta_rule_inputs
from loraserve_kernels.latent import make_latent_inputs
from loraserve_kernels.lora_add import make_lora_inputs
from loraserve_kernels.packed_linear import PackedLinear
from loraserve_kernels.paged_attention import make_attention_inputs
from loraserve_kernels.quantization import ROUNDINGS, STORED
from loraserve_kernels.score import ScoreQuery
from loraserve_kernels.selective_scan import make_selective_scan_inputs

from tests.kernels.four_bits import in_other_order, make_four_bits
from tests.kernels.test_decoder_model import make_caches, make_model, make_model_parts, with_tokens
from tests.support.decoder_cases import CASES, add_dora, make_case, random

ATTENTION = [
    # context_lens, num_rows, num_heads, num_kv_heads, head_dim, block_size
    ([48, 144, 16], [1, 33, 2], 6, 2, 40, 16),
    ([64, 64, 32], [1, 1, 2], 6, 2, 64, 16),
    ([91], [7], 3, 3, 33, 7),
    ([91], [1], 3, 3, 33, 7),
    ([720], [1], 2, 1, 80, 48),
    ([1104], [1], 20, 1, 80, 48),
    ([1104], [1], 71, 1, 33, 48),
]
"""Shapes whose contexts fill their blocks."""
LINEARS = [(1, 1), (17, 33), (100, 65)]
GAP = 128
"""Elements after the last matrix or magnitude of `make_lora_inputs`."""
DTYPES = (torch.float32, torch.bfloat16)


def draws(num_rows: int) -> list[Draw]:
    shapes = [(0, 1.0), (0, 0.9), (5, 1.0), (5, 0.5)]
    return [
        Draw(row, 0.8, top_k, top_p, 0.01, seed=row, position=place)
        for row in range(num_rows)
        for place, (top_k, top_p) in enumerate(shapes)
    ]


def run_models(cpu: CpuBackend, dtype: torch.dtype) -> None:
    for tied in (False, True):
        model = make_model(cpu, make_model_parts(cpu, dtype, tied=tied))
        for name in CASES:
            case = make_case(name, dtype)
            batch = with_tokens(case)
            assert case.table is not None
            for with_dora in (False, True):
                if with_dora:
                    add_dora(case.table, (2,))
                assert model(*make_caches(case), replace(batch, draws=draws(len(batch.sampled_rows))), case.table)


def run_attention(cpu: CpuBackend, dtype: torch.dtype) -> None:
    for shape in ATTENTION:
        inputs = make_attention_inputs(*shape, dtype)
        table = inputs.batch.block_table
        num_blocks = 1 + int(table[table < len(inputs.k_cache)].max())
        caches = inputs.k_cache[:num_blocks].clone(), inputs.v_cache[:num_blocks].clone()
        for window in (None, 21):
            cpu.paged_attention(inputs.q.contiguous(), *caches, inputs.batch, scaling=0.2, sliding_window=window)


def run_lora(cpu: CpuBackend, dtype: torch.dtype) -> None:
    ranks = [(1, 17), (33, 0), (512, 3)]
    for dora in ([], [(0, 0), (0, 1), (1, 0)], [(2, 1)]):
        inputs = make_lora_inputs([1, 5, 0, 67, 3], [0, -1, 1, 2, 1], ranks, 33, (17, 2049), dtype, dora=dora)
        table = replace(inputs.table, arena=inputs.table.arena[:-GAP].clone())
        cpu.lora_add(inputs.y.contiguous(), inputs.x.contiguous(), inputs.group, table, inputs.segments)
    inputs = make_lora_inputs([1, 5, 0, 67, 3], [0, -1, 1, 2, 1], [(17,), (0,), (512,)], 33, (2049,), dtype)
    table = replace(inputs.table, arena=inputs.table.arena[:-GAP].clone())
    token_ids = torch.arange(len(inputs.y)) % 33
    cpu.lora_embed(inputs.y.contiguous(), token_ids, 1.5, inputs.group, table, inputs.segments)


def run_row_ops(cpu: CpuBackend, dtype: torch.dtype) -> None:
    for size in (1, 14, 37, 150):
        x, y = random(3, size, dtype=dtype, seed=1), random(3, size, dtype=dtype, seed=2)
        cpu.rms_norm(x, y[0].clone(), 1e-5)
        cpu.silu_mul(x, y)
        q, k, v = random(3, 3, 1, size, dtype=dtype, seed=3).unbind(1)
        angles, cache = random(3, size // 2 * 2, dtype=dtype, seed=4), torch.zeros(1, 1, 3, size, dtype=dtype)
        parts = [part.contiguous() for part in (q, k, v)]
        cpu.rotary_kv_write(*parts, angles, angles.clone(), cache, cache.clone(), torch.arange(3))
        cpu.kv_write(*parts[1:], cache, cache.clone(), torch.arange(3))


def run_recurrent(cpu: CpuBackend, dtype: torch.dtype) -> None:
    num_rows = [2, 37, 1]
    for num_channels, kernel_size in ((1, 2), (37, 3), (150, 4), (513, 4), (40, 16)):
        conv = make_causal_conv_inputs(num_rows, num_channels, kernel_size, dtype, has_bias=True)
        cpu.causal_conv(conv.x.contiguous(), conv.weight, conv.bias, conv.state, conv.batch, silu=True)
    for k_dim, v_dim in ((1, 1), (16, 32), (33, 70), (7, 83)):
        delta = make_gated_delta_rule_inputs(num_rows, 1, 2, k_dim, v_dim, dtype)
        rows = [part.contiguous() for part in (delta.q, delta.k, delta.v)]
        cpu.gated_delta_rule(*rows, delta.log_decay, delta.beta, delta.state, delta.batch, normalize=True)
    for head_dim, state_dim in ((1, 1), (16, 64), (33, 70), (7, 83)):
        scan = make_selective_scan_inputs(num_rows, 2, 1, head_dim, state_dim, dtype)
        x, dt, b, c = (part.contiguous() for part in (scan.x, scan.dt, scan.b, scan.c))
        of_heads = scan.d, scan.dt_bias, scan.state
        cpu.selective_scan(x, dt, scan.a, b, c, *of_heads, scan.batch, softplus=True, dt_limit=(0.0, 1.0))


def run_latents(cpu: CpuBackend, dtype: torch.dtype) -> None:
    for sizes in ((1, 1, 1, 1, 0), (2, 19, 33, 70, 5), (3, 33, 7, 83, 16)):
        latent = make_latent_inputs([1, 18, 5], [0, -1, 1], [3, 17], *sizes, dtype=dtype, dora=(1,))
        latent.table.arena = latent.table.arena[:-GAP].clone()
        cpu.absorb_keys(latent.q.contiguous(), latent.up, latent.table, latent.segments)
        cpu.expand_values(latent.x[..., : latent.up.latent_dim].contiguous(), latent.up, latent.table, latent.segments)


def run_linears(cpu: CpuBackend, dtype: torch.dtype) -> None:
    for depth, num_outputs in LINEARS:
        weight, bias = (random(*shape, dtype=dtype, seed=1) for shape in ((num_outputs, depth), (num_outputs,)))
        linears = [cpu.linear(weight, bias, keep_weight=keep_weight) for keep_weight in (False, True)]
        for quantization in ROUNDINGS:
            linear = cpu.linear(weight, bias, keep_weight=False, quantization=quantization)
            assert isinstance(linear, PackedLinear)
            linear.rows(torch.arange(num_outputs))
            linears.append(linear)
            cpu.rounded_weight(weight, quantization)
        for linear in linears:
            for num_rows in (1, 2, 5, 18, 65):
                linear(random(num_rows, depth, dtype=dtype, seed=num_rows))
        for form in STORED:
            shape = num_outputs, form.group_size(depth) * (1 + depth // form.group_size(depth))
            four_bits = make_four_bits(form, shape)
            cpu.dequantize_weight(four_bits, weight.new_empty(shape))
            for each in (four_bits, in_other_order(four_bits)):
                linear = cpu.four_bit_linear(each, bias, dtype)
                for num_rows in (1, 2, 5, 18, 65):
                    linear(random(num_rows, shape[1], dtype=dtype, seed=num_rows))


def run_sampling(cpu: CpuBackend, dtype: torch.dtype) -> None:
    for num_logits in (1, 65, 2047):
        logits = random(3, num_logits, dtype=dtype, seed=num_logits)
        cpu.argmax(logits, num_logits)
        cpu.draw(logits, num_logits, draws(3))
        cpu.score(logits, num_logits, [ScoreQuery(row, num_logits - 1, 70) for row in range(3)])


RUNS = (run_models, run_attention, run_lora, run_row_ops, run_recurrent, run_latents, run_linears, run_sampling)


def notices(cpu: CpuBackend) -> bool:
    """Whether a read past the end of a tensor ends a process."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        cpu.library.functions.argmax((c_int64 * 2)(), torch.zeros(33).data_ptr(), 33, 2, 33, 0, 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def main(path: Path) -> None:
    cpu = CpuBackend(open_prebuilt(Variant("sanitized", "", (), frozenset()), path))
    assert notices(cpu)
    torch.set_num_threads(2)
    for dtype in DTYPES:
        for run in RUNS:
            run(cpu, dtype)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

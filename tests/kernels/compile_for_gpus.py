"""Compiles the kernels of the named cases for a GPU that need not exist; prints the resources they need as JSON lines.

A program of its own, because Triton must not be in interpreter mode. The arguments of a launch are exactly those on a
GPU except for their addresses; each launch ends after compiling.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
from loraserve_kernels.kv_float8 import KV_FLOAT8
from loraserve_kernels.logit_edits import RowEdits, pack_edits
from loraserve_kernels.lora_add import make_lora_inputs
from loraserve_kernels.paged_attention import make_attention_inputs
from loraserve_kernels.rotary_kv_write import make_rotary_inputs
from loraserve_kernels.sampling import pack_draws
from loraserve_kernels.triton_backend import TritonBackend
from loraserve_kernels.triton_ops import launch, paged_prefill
from loraserve_kernels.triton_ops.logit_edits import count_tokens
from loraserve_kernels.triton_ops.paged_attention import paged_attention
from loraserve_kernels.triton_ops.sampling import sample
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED_BYTES = {89: 100 * 1024, 90: 228 * 1024}
"""Shared memory of a multiprocessor, by compute capability: Ada and Hopper."""


class AbsentGpuDriver:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(case: str, call: Callable[[], object]) -> None:
    """Run `call` with every launch of a kernel replaced by compiling it."""
    launch = JITFunction.run

    def compile_and_print(self, *args, grid, warmup, **kwargs) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        ptx, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
        needs = {"kernel": self.fn.__name__, "shared_bytes": kernel.metadata.shared, **resources(cubin)}
        code = {"has_wgmma": "wgmma.mma_async" in ptx, "waits_first": waits_first(ptx)}
        print(json.dumps({"case": case, **needs, **code}), flush=True)

    JITFunction.run = compile_and_print
    try:
        call()
    finally:
        JITFunction.run = launch


def waits_first(ptx: str) -> bool:
    """Whether a kernel that may start early waits for the preceding kernel before it touches memory."""
    wait = ptx.find("griddepcontrol.wait")
    touch = re.search(r"(ld|st|atom|red)\.(volatile\.)?global|cp\.async", ptx)
    return wait >= 0 and (touch is None or wait < touch.start())


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread, and bytes of stack per thread: values that did not fit into registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {"registers": int(found[1]), "stack_bytes": int(found[2])}


def attend(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    num_rows: Sequence[int] = (1, 9, 280),
    **options,
) -> Callable[[], object]:
    """Attention over a batch, by default of a decode row, a few rows and a prompt."""
    heads = (num_heads, num_kv_heads, head_dim)
    inputs = make_attention_inputs([300] * len(num_rows), [*num_rows], *heads, dtype=dtype, kv_dtype=kv_dtype)
    arguments = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch)
    return lambda: paged_attention(*arguments, scaling=head_dim**-0.5, **options)


def add_lora(num_rows: int, dtype: torch.dtype, *, may_have_dora: bool = True) -> Callable[[], object]:
    """Rows of two adapters on q|k|v of an 8-billion-parameter model, in an arena aligned as in the engine."""
    inputs = make_lora_inputs([num_rows - 1, 1], [0, 1], [(16,) * 3] * 2, 4096, (4096, 1024, 1024), dtype)
    inputs.table.offset_alignment = 128
    inputs.table.offset_bias = torch.full_like(inputs.table.offset_b, -1)
    if may_have_dora:
        inputs.table.offset_magnitude = torch.full_like(inputs.table.offset_b, -1)
    x, y = inputs.x.contiguous(), inputs.y.contiguous()
    return lambda: TritonBackend().lora_add(y, x, inputs.group, inputs.table, inputs.segments)


def small_ops() -> None:
    """The other ops of a decoder layer of Llama-3-8B, and the adapters of its embedding."""
    backend = TritonBackend()
    x, weight = torch.zeros(2, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    backend.rms_norm(x, weight, 1e-5)
    backend.add_rms_norm(x, x, weight, 1e-5)
    backend.rms_norm(x.unflatten(1, (32, 128)), weight[:128], 1e-5)
    backend.rms_norm(torch.zeros(2, 16384, dtype=torch.bfloat16), torch.zeros(16384, dtype=torch.bfloat16), 1e-5)
    backend.silu_mul(*torch.zeros(2, 28672, dtype=torch.bfloat16).split(14336, dim=1))
    write_kv(None)
    write_kv(KV_FLOAT8)
    for num_rows in (16, 1024):
        lora = make_lora_inputs([num_rows - 1, 1], [0, 1], [(16,)] * 2, 300, (4096,), torch.bfloat16)
        y, token_ids = lora.y.contiguous(), torch.zeros(num_rows, dtype=torch.int64)
        backend.lora_embed(y, token_ids, 1.0, lora.group, lora.table, lora.segments)


def write_kv(kv_dtype: torch.dtype | None) -> None:
    """Writes with rotation of a whole head and of a part of it, and without rotation."""
    backend = TritonBackend()
    for rotary_dim in (128, 64):
        rotary = make_rotary_inputs(16, 32, 8, 128, rotary_dim, torch.bfloat16, kv_dtype=kv_dtype)
        kv = (rotary.kv.k, rotary.kv.v, rotary.kv.k_cache, rotary.kv.v_cache, rotary.kv.slot_mapping)
        backend.rotary_kv_write(rotary.q, *kv[:2], rotary.cos, rotary.sin, *kv[2:])
    backend.kv_write(*kv)


def choose_tokens(dtype: torch.dtype, vocab_size: int) -> None:
    """Greedy tokens, drawn tokens, and tokens drawn from edited logits."""
    logits = torch.zeros(2, vocab_size, dtype=dtype)
    draws = pack_draws([0.8] * 2, [0] * 2, [1.0] * 2, [0.0] * 2, [1, 2], [3, 4])
    edits = pack_edits([RowEdits(bias={3: 1.0}), RowEdits(count_row=0)], torch.zeros(1, vocab_size, dtype=torch.int32))
    sample(logits, vocab_size, None, None)
    sample(logits, vocab_size, draws, None)
    token_ids, is_finite = sample(logits, vocab_size, draws, edits)
    count_tokens(edits, token_ids, is_finite)


SINKS = torch.zeros(64, dtype=torch.bfloat16)
PROMPTS = (9, 280)
"""Rows of prompts, whose tiles need more resources than a decode row's."""
CASES = {
    "attention-128": lambda: attend(32, 8, 128, torch.bfloat16),
    "attention-64-window-sinks": lambda: attend(64, 8, 64, torch.bfloat16, sliding_window=128, sinks=SINKS),
    "attention-256-window-softcap": lambda: attend(
        8, 4, 256, torch.bfloat16, num_rows=PROMPTS, sliding_window=100, softcap=50.0
    ),
    "attention-128-float8": lambda: attend(32, 8, 128, torch.bfloat16, KV_FLOAT8),
    "attention-256-float8-window-softcap": lambda: attend(
        8, 4, 256, torch.bfloat16, KV_FLOAT8, sliding_window=100, softcap=50.0
    ),
    "attention-64-float8-float16": lambda: attend(64, 8, 64, torch.float16, KV_FLOAT8),
    "attention-float32": lambda: attend(8, 8, 64, torch.float32),
    "attention-256-float32": lambda: attend(8, 4, 256, torch.float32, num_rows=PROMPTS),
    "lora-decode": lambda: add_lora(64, torch.bfloat16),
    "lora-decode-more-rows": lambda: add_lora(256, torch.bfloat16),
    "lora-lone-row": lambda: add_lora(2, torch.bfloat16),
    "lora-prefill": lambda: add_lora(1024, torch.bfloat16),
    "lora-decode-without-dora": lambda: add_lora(64, torch.bfloat16, may_have_dora=False),
    "lora-decode-more-rows-without-dora": lambda: add_lora(256, torch.bfloat16, may_have_dora=False),
    "lora-prefill-without-dora": lambda: add_lora(1024, torch.bfloat16, may_have_dora=False),
    "small-ops": lambda: small_ops,
    "sampling-bfloat16-128256": lambda: lambda: choose_tokens(torch.bfloat16, 128_256),
    "sampling-float32-151936": lambda: lambda: choose_tokens(torch.float32, 151_936),
    "sampling-float16-20": lambda: lambda: choose_tokens(torch.float16, 20),
    "lora-decode-float16": lambda: add_lora(64, torch.float16),
    "lora-prefill-float16": lambda: add_lora(1024, torch.float16),
    "lora-decode-float32": lambda: add_lora(64, torch.float32),
    "lora-prefill-float32": lambda: add_lora(1024, torch.float32),
}


def main() -> None:
    """Arguments: the compute capability, such as 90, and names of cases."""
    capability = int(sys.argv[1])
    driver.set_active(AbsentGpuDriver(capability))
    paged_prefill.shared_bytes = lambda _: SHARED_BYTES[capability]
    launch.may_depend = lambda _: (capability // 10, capability % 10) >= launch.FIRST_WITH_DEPENDENT_LAUNCH
    knobs.compilation.disable_line_info = True  # saves a sixth of the time; code, registers and stack are the same
    for name in sys.argv[2:]:
        compile_launches(name, CASES[name]())


if __name__ == "__main__":
    main()

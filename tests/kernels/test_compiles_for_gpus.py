"""Kernels that the interpreter runs without a GPU must also compile for a GPU and fit it.

Covers the cases used in serving, on Hopper, or on a smaller GPU if it has less room; `compile_for_gpus.py` has more
cases, and takes their names.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loraserve_kernels.attention_work import PROGRAMS_PER_SM

KERNELS = ["_paged_decode_kernel", "_merge_kernel", "_paged_decode_kernel", "_merge_kernel", "_paged_prefill_kernel"]
KERNELS_PATH = Path(__file__).parents[2] / "kernels"
OF_TRITON = "ignore:AnnAssign.__init__ missing:DeprecationWarning"
"""Triton rewrites the syntax tree of kernels in a way that Python 3.13 deprecates and 3.15 will reject."""
MAX_SHARED_BYTES = 227 * 1024
MAX_STACK_BYTES = 8
"""Two registers of `paged_decode` that Triton 3.7 spills; 3.6 and 3.9 spill none."""
SMALL_SHARED_BYTES = 99 * 1024
"""The limit of Ada and of other GPUs that are not made for data centers."""


HOPPER_CASES = (
    *("attention-128", "attention-128-float8", "lora-decode", "lora-decode-more-rows", "lora-prefill"),
    *("lora-decode-without-dora", "lora-decode-more-rows-without-dora", "lora-prefill-without-dora"),
    *("small-ops", "sampling-bfloat16-128256"),
)


def compiled(cache: Path, *cases: str, capability: int = 90) -> dict[str, list[dict]]:
    """The resources that the kernels of each case need, in launch order."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(KERNELS_PATH)}
    program = Path(__file__).with_name("compile_for_gpus.py")
    command = [sys.executable, "-W", "error", "-W", OF_TRITON, program, str(capability), *cases]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert {kernel["waits_first"] for kernel in kernels} == {capability >= 90}, "else the one in front may still write"
    return {case: [kernel for kernel in kernels if kernel["case"] == case] for case in cases}


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Compiled in one process, which imports torch and Triton once and compiles kernels that cases share once."""
    return compiled(tmp_path_factory.mktemp("triton"), *HOPPER_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["attention-128", "attention-128-float8"])
def test_attention_fits_registers_and_shared_memory(hopper, case):
    kernels = hopper[case]
    assert [kernel["kernel"] for kernel in kernels] == KERNELS
    assert max(kernel["stack_bytes"] for kernel in kernels) <= MAX_STACK_BYTES
    assert max(kernel["shared_bytes"] for kernel in kernels) <= MAX_SHARED_BYTES
    assert kernels[-1]["has_wgmma"]
    assert kernels[0]["registers"] <= 65536 // (128 * PROGRAMS_PER_SM)
    assert kernels[0]["shared_bytes"] <= MAX_SHARED_BYTES // PROGRAMS_PER_SM


@pytest.mark.slow
def test_attention_with_wide_heads_fits_a_smaller_gpu(tmp_path):
    cases = compiled(tmp_path, "attention-256-window-softcap", "attention-256-float32", capability=89)
    assert [[kernel["kernel"] for kernel in kernels] for kernels in cases.values()] == [KERNELS[2:]] * 2
    kernels = [kernel for kernels in cases.values() for kernel in kernels]
    assert [kernel["stack_bytes"] for kernel in kernels] == [0] * len(kernels)
    assert max(kernel["shared_bytes"] for kernel in kernels) <= SMALL_SHARED_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("table", ["", "-without-dora"], ids=["dora", "without dora"])
@pytest.mark.parametrize(
    ("case", "expand", "max_registers"),
    [
        ("lora-decode", "_lora_expand_rows_kernel", 168),
        ("lora-decode-more-rows", "_lora_expand_kernel", 65536 // 128 // 3),
        ("lora-prefill", "_lora_expand_kernel", 65536 // 128 // 4),
    ],
)
def test_lora_kernels_leave_room_for_several_programs_per_multiprocessor(hopper, case, expand, max_registers, table):
    kernels, is_prefill = hopper[case + table], case == "lora-prefill"
    assert [kernel["kernel"] for kernel in kernels] == ["_lora_shrink_kernel", expand]
    assert [kernel["stack_bytes"] for kernel in kernels] == [0, 0]
    # A multiprocessor has 65,536 registers. A program has 128 threads; two programs of the prefill's shrink must fit.
    # A program of `lora_expand_rows` has 32 threads, and twelve must fit.
    assert kernels[0]["registers"] <= 65536 // 128 // (2 if is_prefill else 3)
    assert kernels[1]["registers"] <= max_registers
    assert max(kernel["shared_bytes"] for kernel in kernels) <= MAX_SHARED_BYTES // 3
    assert [kernel["has_wgmma"] for kernel in kernels] == [is_prefill, is_prefill]


@pytest.mark.slow
def test_the_small_ops_keep_everything_in_registers(hopper):
    kernels = hopper["small-ops"]
    assert {kernel["kernel"] for kernel in kernels} == {
        "_rms_norm_kernel",
        "_silu_mul_kernel",
        "_kv_write_kernel",
        "_rotary_kv_write_kernel",
        "_lora_embed_kernel",
    }
    assert max(kernel["stack_bytes"] for kernel in kernels) == 0
    assert max(kernel["registers"] for kernel in kernels) <= 128


@pytest.mark.slow
def test_sampling_compiles_and_hardly_spills(hopper):
    kernels = hopper["sampling-bfloat16-128256"]
    assert "choose_kernel" in {kernel["kernel"] for kernel in kernels}
    assert max(kernel["stack_bytes"] for kernel in kernels) <= 256
    assert max(kernel["shared_bytes"] for kernel in kernels) <= 48 * 1024

"""A compiled kernel is launched with the arguments Triton itself would pass, and never in place of another variant."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPS = {
    "_lora_embed_kernel",
    "_lora_shrink_kernel",
    "_lora_expand_kernel",
    "_lora_expand_rows_kernel",
    "_paged_decode_kernel",
    "_merge_kernel",
    "_paged_prefill_kernel",
    "_rms_norm_kernel",
    "_silu_mul_kernel",
    "_rotary_kv_write_kernel",
    "_kv_write_kernel",
    "_stats_kernel",
    "_combine_kernel",
    "_lane_mass_kernel",
    "choose_kernel",
    "_edit_all_kernel",
    "_edit_listed_kernel",
    "_count_tokens_kernel",
}


def checked(check: str) -> dict:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "adapters"))
    program = Path(__file__).with_name("compiled_launches.py")
    run = subprocess.run(
        [sys.executable, "-W", "error", program, check], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_launcher_gets_the_arguments_triton_would_pass():
    assert set(checked("arguments")["kernels"]) == OPS


def test_changed_arguments_and_constants_select_the_variant_triton_would():
    counts = checked("variants")
    assert counts["num_by_triton"] < 0.7 * counts["num_changed"], "else hardly any variant was met twice"
    assert counts["num_variants"] > 0.4 * counts["num_changed"], "else hardly any change made another"


def test_hooks_and_unknown_triton_versions_leave_launches_to_triton():
    counts = checked("fallbacks")
    assert counts == dict.fromkeys(counts, 1)
    assert "another Triton" in counts

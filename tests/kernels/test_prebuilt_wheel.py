"""A released wheel: kernels compiled for every variant, for machines without a compiler."""

import json
import os
import platform
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from loraserve_kernels.c_compiler import find_compilers
from loraserve_kernels.cpu_variants import VARIANTS, cpu_flags, usable_variants

from tests.support.cpu_libraries import compiling_once

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]
HERE = [variant for variant in VARIANTS if variant.machine == platform.machine()]

PROGRAM = """
import json, pathlib, re, sys
import torch
from loraserve_kernels import cpu_library
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_variants import find_prebuilt
from loraserve_kernels.lora_add import make_lora_inputs, make_popularity
from loraserve_kernels.reference_backend import ReferenceBackend

torch.set_num_threads(2)
backend, reason = choose_backend("cpu", "cpu", pathlib.Path(sys.argv[1]))

def lora_add(backend):
    rows, slots = make_popularity("zipf", 24, 16)
    case = make_lora_inputs(rows, slots, [(8, 5)] * 16, 768, (640, 641), torch.bfloat16)
    backend.lora_add(case.y, case.x, case.group, case.table, case.segments)
    return case.y.float()

expected = lora_add(ReferenceBackend())
differences = {
    variant.name: (lora_add(CpuBackend(cpu_library.open_prebuilt(variant, path))) - expected).abs().max().item()
    for variant, path in find_prebuilt()
}
maps = pathlib.Path("/proc/self/maps").read_text()
print(json.dumps({
    "reason": reason,
    "module": cpu_library.__file__,
    "library": str(backend.library.path),
    "openmp": sorted(set(re.findall(r"/.*/lib(?:gomp|iomp5|omp)\\b\\S*", maps))),
    "differences": differences,
    "scale": expected.abs().max().item(),
}))
"""


@pytest.fixture(scope="module")
def no_compiler(tmp_path_factory):
    """An environment where nothing compiles."""
    return {**os.environ, "PATH": str(tmp_path_factory.mktemp("bin")), "CC": "/nowhere/cc"}


def build_wheel(directory, environment):
    """Build without isolation, so that nothing is downloaded."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def released_wheel(tmp_path_factory):
    compiler = next(find_compilers(), None)
    if sys.platform != "linux" or not HERE or compiler is None:
        pytest.skip("needs Linux, a C compiler and an architecture with variants")
    compiling = {"CC": shlex.join(compiling_once(compiler).command), "LORASERVE_PREBUILD": "1"}
    return build_wheel(tmp_path_factory.mktemp("dist"), os.environ | compiling)


@pytest.mark.slow
def test_a_released_wheel_contains_every_variant_and_names_its_platform(released_wheel):
    assert released_wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(released_wheel) as archive:
        libraries = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    assert set(libraries) == {f"loraserve_kernels/prebuilt/{variant.file_name}" for variant in HERE}
    # A runtime named here would be loaded in addition to torch's if torch's file has another name.
    assert not [name for name, content in libraries.items() if b"libgomp" in content]


@pytest.mark.slow
def test_a_released_wheels_kernels_run_without_a_compiler_on_torchs_openmp_runtime(
    released_wheel, no_compiler, tmp_path
):
    usable = usable_variants(platform.machine(), cpu_flags())
    if not usable:
        pytest.skip("no variant for this CPU")
    site = tmp_path / "site"
    with zipfile.ZipFile(released_wheel) as archive:
        archive.extractall(site)
    result = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(tmp_path / "cache")],
        cwd=tmp_path,
        env={**no_compiler, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["module"].startswith(str(site))
    assert f"prebuilt for {usable[0].name}" in found["reason"]
    assert found["library"] == str(site / "loraserve_kernels/prebuilt" / usable[0].file_name)
    assert len(found["openmp"]) == 1
    assert found["openmp"][0] in found["reason"]
    assert list(found["differences"]) == [variant.name for variant in usable]
    # One rounding to bfloat16 of the largest element.
    assert max(found["differences"].values()) <= found["scale"] * 2**-7


@pytest.mark.slow
def test_any_other_wheel_is_pure_and_needs_no_compiler(no_compiler, tmp_path):
    environment = {name: value for name, value in no_compiler.items() if name != "LORASERVE_PREBUILD"}
    wheel = build_wheel(tmp_path, environment)
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]

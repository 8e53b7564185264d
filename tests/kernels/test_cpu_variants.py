import platform
import subprocess

import pytest
from loraserve_kernels import cpu_variants as module
from loraserve_kernels.c_compiler import find_compilers
from loraserve_kernels.cpu_variants import VARIANTS, X86_64_V3, X86_64_V4, cpu_flags, find_prebuilt, usable_variants

NAMES = [variant.name for variant in VARIANTS]
OTHER_FLAGS = frozenset({"fpu", "sse2", "amx_tile"})


def names(machine, flags):
    return [variant.name for variant in usable_variants(machine, frozenset(flags) | OTHER_FLAGS)]


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        (
            "x86_64",
            X86_64_V4 | {"avx512_vnni", "avx512_bf16"},
            ["x86-64-v4-bf16", "x86-64-v4-vnni", "x86-64-v4", "x86-64-v3"],
        ),
        ("x86_64", X86_64_V4 | {"avx512_vnni"}, ["x86-64-v4-vnni", "x86-64-v4", "x86-64-v3"]),
        ("x86_64", X86_64_V4, ["x86-64-v4", "x86-64-v3"]),
        ("x86_64", X86_64_V3 | {"avx_vnni"}, ["x86-64-v3-vnni", "x86-64-v3"]),
        ("x86_64", X86_64_V3, ["x86-64-v3"]),
        ("x86_64", X86_64_V3 | {"avx512f", "avx512_bf16"}, ["x86-64-v3"]),
        ("x86_64", X86_64_V3 - {"fma"}, []),
        ("x86_64", [], []),
        ("aarch64", "fp asimd crc32 atomics asimdrdm dcpop".split(), ["armv8.2-a"]),
        ("aarch64", ["fp", "asimd"], []),
        ("aarch64", X86_64_V4, []),
        ("riscv64", X86_64_V4, []),
    ],
)
def test_the_best_variant_comes_first(machine, flags, expected):
    assert names(machine, flags) == expected


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_a_variant_with_any_flag_missing_is_never_chosen(variant):
    for flag in variant.cpu_flags:
        assert variant not in usable_variants(variant.machine, variant.cpu_flags - {flag})


def test_a_flag_that_one_core_lacks_does_not_count(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fma avx2\n\nprocessor\t: 1\nflags\t\t: avx2 bmi1\n")
    assert cpu_flags(cpuinfo) == {"avx2"}


def test_flags_of_an_arm_cpu_are_read_from_its_features(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd atomics\nCPU part\t: 0xd40\n")
    assert cpu_flags(cpuinfo) == {"fp", "asimd", "atomics"}


def test_without_flags_in_cpuinfo_no_flags_are_assumed(tmp_path):
    (tmp_path / "empty").write_text("processor\t: 0\n")
    assert cpu_flags(tmp_path / "missing") == cpu_flags(tmp_path / "empty") == frozenset()


def test_only_prebuilt_libraries_for_this_cpu_are_found(monkeypatch, tmp_path):
    for variant in VARIANTS:
        (tmp_path / variant.file_name).touch()
    monkeypatch.setattr(module, "PREBUILT_DIR", tmp_path)
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(module, "cpu_flags", lambda: X86_64_V4)
    assert [path.name for _, path in find_prebuilt()] == ["x86-64-v4.so", "x86-64-v3.so"]
    (tmp_path / "x86-64-v4.so").unlink()
    assert [variant.name for variant, _ in find_prebuilt()] == ["x86-64-v3"]


def test_an_installation_from_source_has_no_prebuilt_libraries():
    assert list(find_prebuilt()) == []


FLAG_MACROS = {  # macros that GCC and clang define for instruction sets, and their names in /proc/cpuinfo
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__POPCNT__": "popcnt",
    "__MOVBE__": "movbe",
    "__XSAVE__": "xsave",
    "__F16C__": "f16c",
    "__FMA__": "fma",
    "__LZCNT__": "abm",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512CD__": "avx512cd",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVXVNNI__": "avx_vnni",
    "__AMX_TILE__": "amx_tile",
    "__ARM_FEATURE_CRC32": "crc32",
    "__ARM_FEATURE_ATOMICS": "atomics",
    "__ARM_FEATURE_QRDMX": "asimdrdm",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_FEATURE_BF16": "bf16",
    "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_FP16_SCALAR_ARITHMETIC": "fphp",
}


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_a_variant_names_every_instruction_set_its_compiler_may_use(variant):
    compiler = next(find_compilers(), None)
    if compiler is None or variant.machine != platform.machine():
        pytest.skip(f"needs a C compiler on {variant.machine}")
    macros = subprocess.run(
        [*compiler.command, *variant.compile_flags, "-dM", "-E", "-"],
        input="",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    used = {FLAG_MACROS[line.split()[1]] for line in macros.splitlines() if line.split()[1] in FLAG_MACROS}
    assert used
    assert used <= variant.cpu_flags

"""The prebuilt libraries in released wheels: one per instruction set, chosen by the flags of the CPU.

A variant is loaded only if the CPU has every flag it was compiled for. Standard library only, like `c_compiler`.
"""

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREBUILT_DIR = Path(__file__).parent / "prebuilt"

X86_64_V3 = frozenset("pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm movbe xsave f16c fma abm avx avx2 bmi1 bmi2".split())
X86_64_V4 = X86_64_V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    machine: str
    """As `platform.machine()` returns it."""
    compile_flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    """Instruction sets that the compiler may use, as named in /proc/cpuinfo."""

    @property
    def file_name(self) -> str:
        return f"{self.name}.so"


VARIANTS = (
    # Best first. A 16-row bfloat16 linear on Zen 5: 249 us with bfloat16 products, 964 without, 2,581 with AVX2.
    Variant(
        "x86-64-v4-bf16",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        X86_64_V4 | {"avx512_vnni", "avx512_bf16"},
    ),
    Variant("x86-64-v4-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), X86_64_V4 | {"avx512_vnni"}),
    Variant("x86-64-v4", "x86_64", ("-march=x86-64-v4",), X86_64_V4),
    Variant("x86-64-v3-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), X86_64_V3 | {"avx_vnni"}),
    Variant("x86-64-v3", "x86_64", ("-march=x86-64-v3",), X86_64_V3),
    Variant("armv8.2-a", "aarch64", ("-march=armv8.2-a",), frozenset("fp asimd crc32 atomics asimdrdm dcpop".split())),
)


def find_prebuilt() -> Iterator[tuple[Variant, Path]]:
    """The variants that this wheel contains and this CPU can run, best first; none in a wheel built without them."""
    for variant in usable_variants(platform.machine(), cpu_flags()):
        path = PREBUILT_DIR / variant.file_name
        if path.is_file():
            yield variant, path


def usable_variants(machine: str, flags: frozenset[str]) -> list[Variant]:
    return [variant for variant in VARIANTS if variant.machine == machine and variant.cpu_flags <= flags]


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Flags that every core has and the system allows; empty if they cannot be read."""
    try:
        lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset.intersection(*(frozenset(line.split()) for line in lines)) if lines else frozenset()

"""How glibc's malloc treats large blocks: one way while weights are copied, another while steps run.

Has no effect with another C library.
"""

import ctypes
from collections.abc import Mapping

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MIB = 1 << 20
_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process whose large blocks request huge pages; keeps a setting that the user chose.

    Huge pages can only be requested before a process starts. This changes nothing if the system gives them to no
    process or to all, that is, if `/sys/kernel/mm/transparent_hugepage/enabled` is "never" or "always".
    """
    tunables = environment.get(_TUNABLES, "")
    if _HUGE_PAGES in tunables:
        return dict(environment)
    return {**environment, _TUNABLES: f"{tunables}:{_HUGE_PAGES}=1".removeprefix(":")}


def return_large_blocks() -> None:
    """Return every block of 1 MiB or more to the system when it is freed, so that copying weights leaves no holes.

    This lowered the peak of loading a 536 MB model by 28 MB.
    """
    _set(_M_MMAP_THRESHOLD, _MIB)


def keep_large_blocks() -> None:
    """From now on keep freed activations for the next step, which then takes no page faults."""
    _call("malloc_trim", 0)  # frees holes between weights smaller than 1 MiB, such as those of experts
    _set(_M_MMAP_THRESHOLD, 32 * _MIB)  # the most glibc accepts
    _set(_M_TRIM_THRESHOLD, 256 * _MIB)


def _set(parameter: int, value: int) -> None:
    _call("mallopt", parameter, value)


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)

"""How many CPUs and how much memory this process may really use: affinity, cgroup v1 or v2 limits, then the machine."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loraserve_kernels.macos import sysctl


@dataclass(frozen=True, slots=True)
class SystemPaths:
    """Where the kernel reports limits; tests point these at a fake tree."""

    self_cgroup: Path = Path("/proc/self/cgroup")
    cgroup_root: Path = Path("/sys/fs/cgroup")
    meminfo: Path = Path("/proc/meminfo")


SYSTEM_PATHS = SystemPaths()


def available_cpus(paths: SystemPaths = SYSTEM_PATHS) -> int:
    """CPUs in our affinity mask, lowered to the cgroup quota, at least 1. On macOS the performance cores.

    A fractional quota rounds down: OpenMP splits work evenly, so one throttled thread would delay all others.
    """
    num_cpus = _affinity_cpus()
    for quota in _limits("cpu", paths, _v2_cpu_quota, _v1_cpu_quota):
        num_cpus = min(num_cpus, int(quota))
    return max(num_cpus, 1)


def available_memory_bytes(paths: SystemPaths = SYSTEM_PATHS) -> int:
    """Bytes we can still allocate before the machine swaps or a cgroup above us kills us. 0 or more."""
    available = _machine_available_bytes(paths.meminfo)
    for headroom in _limits("memory", paths, _v2_memory_headroom, _v1_memory_headroom):
        available = min(available, int(headroom))
    return max(available, 0)


def _affinity_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    if sys.platform == "darwin":
        # Efficiency cores would get an equal share of each loop, and all others would wait for them.
        num_fast = sysctl("hw.perflevel0.logicalcpu")
        if num_fast.isdigit() and int(num_fast) > 0:
            return int(num_fast)
    return os.cpu_count() or 1


def _machine_available_bytes(meminfo: Path) -> int:
    available_kib = _read_table(meminfo).get("MemAvailable:")
    if available_kib is not None:
        return available_kib * 1024
    # macOS has no MemAvailable; most of its memory can be reclaimed, so half of it is a safe guess.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


_LimitReader = Callable[[Path], float | None]


def _limits(controller: str, paths: SystemPaths, read_v2: _LimitReader, read_v1: _LimitReader) -> Iterator[float]:
    """Every limit of `controller` that binds us: each ancestor of our group may set one."""
    for directory in _v2_directories(paths):
        if (limit := read_v2(directory)) is not None:
            yield limit
    for directory in _v1_directories(controller, paths):
        if (limit := read_v1(directory)) is not None:
            yield limit


def _v2_directories(paths: SystemPaths) -> Iterator[Path]:
    for controllers, group in _memberships(paths.self_cgroup):
        if controllers == "":
            yield from _with_ancestors(paths.cgroup_root, group)


def _v1_directories(controller: str, paths: SystemPaths) -> Iterator[Path]:
    for controllers, group in _memberships(paths.self_cgroup):
        if controller not in controllers.split(","):
            continue
        for mount in dict.fromkeys((controllers, controller)):
            yield from _with_ancestors(paths.cgroup_root / mount, group)


def _memberships(self_cgroup: Path) -> Iterator[tuple[str, str]]:
    """(controllers, group) per line of /proc/self/cgroup; controllers is empty for cgroup v2."""
    for line in (_read_text(self_cgroup) or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            yield parts[1], parts[2]


def _with_ancestors(mount: Path, group: str) -> Iterator[Path]:
    """The group's directory and all above it up to the mount.

    Inside a container the group's path may be the host's and not exist here; the mount's root is then our own group.
    """
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _v2_cpu_quota(directory: Path) -> float | None:
    words = (_read_text(directory / "cpu.max") or "").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _v1_cpu_quota(directory: Path) -> float | None:
    quota_us = _read_int(directory / "cpu.cfs_quota_us")
    period_us = _read_int(directory / "cpu.cfs_period_us")
    if quota_us is None or not period_us or quota_us <= 0:
        return None
    return quota_us / period_us


def _v2_memory_headroom(directory: Path) -> float | None:
    return _memory_headroom(directory, "memory.max", "memory.current", "inactive_file")


def _v1_memory_headroom(directory: Path) -> float | None:
    return _memory_headroom(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _memory_headroom(directory: Path, limit: str, usage: str, reclaimable: str) -> float | None:
    """Limit - usage, where page cache that the kernel drops under pressure does not count as used."""
    limit_bytes = _read_int(directory / limit)
    usage_bytes = _read_int(directory / usage)
    if limit_bytes is None or usage_bytes is None:
        return None
    cached_bytes = _read_table(directory / "memory.stat").get(reclaimable, 0)
    return limit_bytes - max(usage_bytes - cached_bytes, 0)


def _read_table(path: Path) -> dict[str, int]:
    """Lines of "name value …" as in memory.stat and /proc/meminfo."""
    rows = (line.split() for line in (_read_text(path) or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _read_int(path: Path) -> int | None:
    """None if the file is missing or says "max"."""
    try:
        return int(_read_text(path) or "")
    except ValueError:
        return None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None

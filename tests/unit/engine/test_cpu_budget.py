import os
import sys
from pathlib import Path

import pytest

from loraserve.engine import cpu_budget
from loraserve.engine.cpu_budget import SystemPaths, available_cpus, available_memory_bytes

GIB = 1 << 30
MACHINE_BYTES = 64 * GIB


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemPaths:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    paths = SystemPaths(tmp_path / "self_cgroup", tmp_path / "cgroup", tmp_path / "meminfo")
    paths.meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable: {MACHINE_BYTES // 1024} kB\nHugePages_Total: 0\n")
    return paths


def put(paths: SystemPaths, name: str, text: str) -> None:
    path = paths.cgroup_root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_without_cgroups_the_affinity_and_the_machines_memory_count(paths: SystemPaths) -> None:
    assert available_cpus(paths) == 8
    assert available_memory_bytes(paths) == MACHINE_BYTES


@pytest.mark.parametrize(("answer", "cpus"), [("6", 6), ("0", 10), ("", 10)])
def test_only_performance_cores_count_on_macos(
    paths: SystemPaths, monkeypatch: pytest.MonkeyPatch, answer: str, cpus: int
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.setattr(cpu_budget, "sysctl", {"hw.perflevel0.logicalcpu": answer}.__getitem__)
    assert available_cpus(paths) == cpus


def test_v2_quota_of_an_ancestor_applies(paths: SystemPaths) -> None:
    paths.self_cgroup.write_text("0::/kube/pod/box\n")
    put(paths, "kube/pod/box/cpu.max", "max 100000")
    put(paths, "kube/pod/cpu.max", "300000 100000")
    put(paths, "kube/cpu.max", "600000 100000")
    assert available_cpus(paths) == 3


@pytest.mark.parametrize(("quota", "cpus"), [("50000", 1), ("199999", 1), ("250000", 2), ("1000000", 8)])
def test_fractional_quota_rounds_down_but_never_below_one(paths: SystemPaths, quota: str, cpus: int) -> None:
    paths.self_cgroup.write_text("0::/\n")
    put(paths, "cpu.max", f"{quota} 100000")
    assert available_cpus(paths) == cpus


def test_v2_memory_is_limit_minus_usage_without_reclaimable_cache(paths: SystemPaths) -> None:
    paths.self_cgroup.write_text("0::/box\n")
    put(paths, "box/memory.max", str(8 * GIB))
    put(paths, "box/memory.current", str(5 * GIB))
    put(paths, "box/memory.stat", f"anon 1\ninactive_file {2 * GIB}\nactive_file 7")
    assert available_memory_bytes(paths) == 5 * GIB


def test_v2_unlimited_memory_means_the_machines_available_memory(paths: SystemPaths) -> None:
    paths.self_cgroup.write_text("0::/box\n")
    put(paths, "box/memory.max", "max")
    put(paths, "box/memory.current", str(5 * GIB))
    assert available_memory_bytes(paths) == MACHINE_BYTES


def test_memory_over_the_limit_is_zero(paths: SystemPaths) -> None:
    paths.self_cgroup.write_text("0::/\n")
    put(paths, "memory.max", str(GIB))
    put(paths, "memory.current", str(2 * GIB))
    assert available_memory_bytes(paths) == 0


def test_v1_limits_are_read_from_joint_and_single_controller_mounts(paths: SystemPaths) -> None:
    paths.self_cgroup.write_text("9:name=systemd:/x\n4:memory:/box\n2:cpu,cpuacct:/box\n0::/\n")
    put(paths, "cpu,cpuacct/box/cpu.cfs_quota_us", "200000")
    put(paths, "cpu,cpuacct/box/cpu.cfs_period_us", "100000")
    put(paths, "memory/box/memory.limit_in_bytes", str(4 * GIB))
    put(paths, "memory/box/memory.usage_in_bytes", str(3 * GIB))
    put(paths, "memory/box/memory.stat", f"total_inactive_file {GIB}")
    assert available_cpus(paths) == 2
    assert available_memory_bytes(paths) == 2 * GIB


def test_v1_unlimited_is_no_limit(paths: SystemPaths) -> None:
    paths.self_cgroup.write_text("4:memory:/\n1:cpu:/\n")
    put(paths, "cpu/cpu.cfs_quota_us", "-1")
    put(paths, "cpu/cpu.cfs_period_us", "100000")
    put(paths, "memory/memory.limit_in_bytes", "9223372036854771712")
    put(paths, "memory/memory.usage_in_bytes", "0")
    assert available_cpus(paths) == 8
    assert available_memory_bytes(paths) == MACHINE_BYTES


def test_a_host_path_that_the_container_lacks_falls_back_to_the_mount(paths: SystemPaths) -> None:
    paths.self_cgroup.write_text("1:cpu:/docker/0123abcd\n")
    put(paths, "cpu/cpu.cfs_quota_us", "400000")
    put(paths, "cpu/cpu.cfs_period_us", "100000")
    assert available_cpus(paths) == 4


def test_this_machine_has_cpus_and_memory() -> None:
    assert available_cpus() >= 1
    assert available_memory_bytes() > 0

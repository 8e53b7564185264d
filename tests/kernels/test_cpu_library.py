import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loraserve_kernels import c_compiler, cpu_variants
from loraserve_kernels.c_compiler import CompilerUnavailable, find_compilers
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_builds import builds, private_directory
from loraserve_kernels.cpu_calls import SIGNATURES
from loraserve_kernels.cpu_library import load_cpu_library, open_build
from loraserve_kernels.lora_add import make_lora_inputs
from loraserve_kernels.reference_backend import ReferenceBackend

KERNELS = Path(__file__).parents[2] / "kernels"

PROGRAM = """
import sys
from pathlib import Path
from loraserve_kernels.cpu_library import load_cpu_library
print(load_cpu_library(Path(sys.argv[1])).path)
"""


@pytest.fixture
def tiny_sources(monkeypatch, tmp_path, cpu_library):
    """Sources with an empty function for every exported name: they compile in a fraction of a second."""
    directory = tmp_path / "csrc"
    directory.mkdir()
    functions = [f'__attribute__((visibility("default"))) int {name}(void) {{ return 0; }}' for name in SIGNATURES]
    (directory / "tiny.c").write_text("\n".join(functions))
    monkeypatch.setattr(c_compiler, "SOURCE_DIR", directory)
    return directory


@pytest.fixture
def tiny_prebuilt(monkeypatch, tiny_sources, tmp_path):
    """The tiny sources compiled as in a wheel, for the best variant of this CPU."""
    variants = cpu_variants.usable_variants(platform.machine(), cpu_variants.cpu_flags())
    if not variants:
        pytest.skip("no variant for this CPU")
    directory = tmp_path / "prebuilt"
    directory.mkdir()
    monkeypatch.setattr(cpu_variants, "PREBUILT_DIR", directory)
    path = directory / variants[0].file_name
    next(find_compilers()).build(path, variants[0].compile_flags)
    return path


def test_a_second_load_reuses_the_compiled_file(tiny_sources, tmp_path):
    first = load_cpu_library(tmp_path / "cache")
    before = first.path.stat().st_mtime_ns
    assert load_cpu_library(tmp_path / "cache").path == first.path
    assert first.path.stat().st_mtime_ns == before
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.path.name]


def test_changed_sources_get_another_file(tiny_sources, tmp_path):
    first = load_cpu_library(tmp_path / "cache")
    with (tiny_sources / "tiny.c").open("a") as file:
        file.write("/* changed */")
    assert load_cpu_library(tmp_path / "cache").path != first.path


def test_a_damaged_file_is_built_again(tiny_sources, tmp_path):
    directory = private_directory(tmp_path / "cache")
    path = directory / f"{next(builds()).key()}.so"
    path.write_bytes(b"not a library")
    assert load_cpu_library(directory).path == path
    assert path.read_bytes().startswith(b"\x7fELF")


def test_two_builds_at_once_both_load(tiny_sources, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(load_cpu_library, [tmp_path / "cache"] * 2)
    assert first.path == second.path


def test_a_new_process_finds_the_cached_file(cpu_library):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cpu_library.path.parent)],
        env={**os.environ, "PYTHONPATH": str(KERNELS)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == str(cpu_library.path)


def test_only_torchs_openmp_runtime_is_loaded(cpu_library):
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    torch.randn(100_000).sum()
    maps = Path("/proc/self/maps").read_text()
    runtimes = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libgomp" in line or "libomp" in line}
    assert len(runtimes) == 1


def test_a_directory_others_can_write_to_is_not_used(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    private = private_directory(shared)
    assert private != shared
    assert private.stat().st_mode & 0o077 == 0
    private.rmdir()


@pytest.mark.skipif(not hasattr(os, "ST_NOEXEC"), reason="this system does not tell")
def test_nothing_is_compiled_into_directories_mounted_noexec(tiny_sources, monkeypatch, tmp_path):
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    noexec = [cache]
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC if any(path.is_relative_to(at) for at in noexec) else 0),
    )
    assert load_cpu_library(cache).path.is_relative_to(temporary)
    noexec.append(temporary)
    with pytest.raises(CompilerUnavailable, match=f"{temporary} is mounted noexec: .*TMPDIR"):
        load_cpu_library(cache)
    assert list(cache.iterdir()) == []


def test_the_default_directory_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert private_directory(None) == tmp_path / "loraserve"


def test_without_a_compiler_auto_chooses_the_reference_backend(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    backend, reason = choose_backend("cpu", cache_dir=tmp_path)
    assert backend.name == "reference"
    assert "no C compiler found" in reason
    with pytest.raises(CompilerUnavailable):
        choose_backend("cpu", "cpu", cache_dir=tmp_path)


def test_a_prebuilt_library_needs_no_compiler(monkeypatch, tiny_prebuilt, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    backend, reason = choose_backend("cpu", cache_dir=tmp_path / "cache")
    assert backend.name == "cpu"
    assert f"prebuilt for {tiny_prebuilt.stem}" in reason
    assert not (tmp_path / "cache").exists()


def test_a_damaged_prebuilt_library_is_replaced_by_compiling(tiny_prebuilt, tmp_path):
    tiny_prebuilt.write_bytes(b"not a library")
    assert load_cpu_library(tmp_path / "cache").path.parent == tmp_path / "cache"


def test_the_error_names_a_damaged_prebuilt_library_if_there_is_no_compiler(monkeypatch, tiny_prebuilt, tmp_path):
    tiny_prebuilt.write_bytes(b"not a library")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(CompilerUnavailable, match=f"{tiny_prebuilt.stem}: .*no C compiler found"):
        load_cpu_library(tmp_path / "cache")


def test_the_output_of_a_failing_compiler_is_reported(monkeypatch, tiny_sources, tmp_path):
    (tiny_sources / "tiny.c").write_text("#error planted")
    with pytest.raises(CompilerUnavailable, match="planted"):
        load_cpu_library(tmp_path / "cache")
    backend, reason = choose_backend("cpu", cache_dir=tmp_path / "cache")
    assert backend.name == "reference"
    assert "planted" in reason


def test_cc_from_the_environment_comes_first(monkeypatch, cpu_library):
    monkeypatch.setenv("CC", "gcc -DCHOSEN")
    assert next(builds()).compiler.command[1:] == ("-DCHOSEN",)


def test_auto_chooses_the_c_backend_on_a_cpu(cpu_library):
    backend, reason = choose_backend("cpu", cache_dir=cpu_library.path.parent)
    assert backend.name == "cpu"
    assert cpu_library.origin in reason


def test_unknown_backends_and_devices_are_refused():
    with pytest.raises(ValueError, match="'tritn'"):
        choose_backend("cpu", "tritn")
    with pytest.raises(ValueError, match="cuda"):
        choose_backend("cuda", "cpu")
    assert choose_backend("meta")[0].name == "reference"


def test_a_build_without_openmp_matches_the_reference(monkeypatch, tmp_path, cpu_library, assert_close):
    build = next(build for build in builds() if build.openmp == "none")
    monkeypatch.setattr(c_compiler, "FLAGS", ("-O1", *c_compiler.FLAGS[1:]))
    library = open_build(build.run(private_directory(tmp_path)), build)
    inputs = make_lora_inputs([2, 3], [0, 1], [(8,), (4,)], 64, (48,))
    expected = make_lora_inputs([2, 3], [0, 1], [(8,), (4,)], 64, (48,))
    for backend, case in ((ReferenceBackend(), expected), (CpuBackend(library), inputs)):
        backend.lora_add(case.y, case.x, case.group, case.table, case.segments)
    assert_close(inputs.y, expected.y.double())

import ctypes
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from loraserve_kernels import cpu_builds as module
from loraserve_kernels import cpu_library
from loraserve_kernels.c_compiler import Compiler
from loraserve_kernels.cpu_builds import Build, builds, cpu_description, loaded_openmp_runtime

CLANG = Compiler(("/usr/bin/cc",), "Apple clang version 17.0.0")


@pytest.fixture
def torch_lib(monkeypatch, tmp_path):
    """The library folder of torch on a Mac."""
    torch_lib = tmp_path / "torch" / "lib"
    torch_lib.mkdir(parents=True)
    monkeypatch.setattr(sys, "platform", "darwin")
    spec = ModuleSpec("torch", None, origin=str(torch_lib.parent / "__init__.py"))
    monkeypatch.setattr(module, "find_spec", lambda name: spec)
    monkeypatch.setattr(module, "find_compilers", lambda: iter([CLANG]))
    return torch_lib


def test_a_mac_uses_the_openmp_runtime_of_torch_or_none(torch_lib):
    (torch_lib / "libomp.dylib").touch()
    assert [build.openmp for build in builds()] == [str(torch_lib / "libomp.dylib"), "none"]


def test_a_mac_whose_torch_has_no_openmp_runtime_uses_none(torch_lib):
    assert [build.openmp for build in builds()] == ["none"]


def test_a_mac_compiles_with_openmp_but_links_to_no_runtime(monkeypatch, torch_lib, tmp_path):
    flags = []
    monkeypatch.setattr(Compiler, "build", lambda self, target, *given: flags.append(given))
    Build(CLANG, str(torch_lib / "libomp.dylib")).run(tmp_path)
    Build(CLANG, "none").run(tmp_path)
    assert flags == [
        ((module.NATIVE_FLAG, "-Xclang", "-fopenmp"), ("-Wl,-undefined,dynamic_lookup",)),
        ((module.NATIVE_FLAG,), ()),
    ]


def test_a_mac_loads_the_openmp_runtime_before_the_library(monkeypatch, torch_lib):
    loaded = []

    class FakeCDLL:
        def __init__(self, name, mode=ctypes.DEFAULT_MODE):
            loaded.append((name, mode))

        def amx_enable(self, wanted):
            return 0

    monkeypatch.setattr(ctypes, "CDLL", FakeCDLL)
    monkeypatch.setattr(cpu_library, "open_functions", lambda path: FakeCDLL(str(path)))
    cpu_library.open_build(Path("ours.so"), Build(CLANG, "libomp.dylib"))
    cpu_library.open_build(Path("alone.so"), Build(CLANG, "none"))
    assert loaded == [
        ("libomp.dylib", ctypes.RTLD_GLOBAL),
        ("ours.so", ctypes.DEFAULT_MODE),
        ("alone.so", ctypes.DEFAULT_MODE),
    ]


def test_the_path_of_the_openmp_runtime_may_have_spaces(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f10 r-xp 00000000 08:01 7 /usr/lib/libgomp.so.1.0.0\n"
        "7f10-7f20 r-xp 00000000 08:01 8                    /home/my user/venv/torch/lib/libgomp-a3.so.1\n"
        "7f20-7f30 rw-p 00000000 00:00 0\n"
        "7f30-7f40 r-xp 00000000 08:01 9 /home/my user/venv/torch/lib/libtorch.so\n"
    )
    assert loaded_openmp_runtime(maps) == Path("/home/my user/venv/torch/lib/libgomp-a3.so.1")
    maps.write_text("7f20-7f30 rw-p 00000000 00:00 0\n")
    assert loaded_openmp_runtime(maps) is None
    assert loaded_openmp_runtime(tmp_path / "missing") is None


def test_the_description_of_a_mac_names_its_cpu(monkeypatch):
    def no_cpuinfo(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", no_cpuinfo)
    monkeypatch.setattr(module, "sysctl", {"machdep.cpu.brand_string": "Apple M1"}.__getitem__)
    assert "Apple M1" in cpu_description()

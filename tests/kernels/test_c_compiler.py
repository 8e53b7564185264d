import shutil
import sys
import threading
import time

import pytest
from loraserve_kernels import c_compiler as module
from loraserve_kernels.c_compiler import MAX_PARALLEL_FILES, Compiler, find_compilers


@pytest.fixture
def asked(monkeypatch):
    """A Mac with Homebrew's GCC as $CC. Returns the compilers whose version was queried."""
    asked = []

    def compiler_version(command):
        asked.append(command[0])
        return "a compiler"

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(shutil, "which", lambda name: name if name.startswith("/") else f"/usr/bin/{name}")
    monkeypatch.setattr(module.os.path, "realpath", lambda path: path)
    monkeypatch.setattr(module, "compiler_version", compiler_version)
    monkeypatch.setenv("CC", "/opt/homebrew/bin/gcc-15")
    return asked


def test_a_mac_without_command_line_tools_does_not_run_cc_which_opens_a_dialog(monkeypatch, asked):
    monkeypatch.setattr(module, "has_command_line_tools", lambda: False)
    assert [compiler.command for compiler in find_compilers()] == [("/opt/homebrew/bin/gcc-15",)]
    assert asked == ["/opt/homebrew/bin/gcc-15"]


def test_a_mac_with_command_line_tools_uses_them(monkeypatch, asked):
    monkeypatch.setattr(module, "has_command_line_tools", lambda: True)
    assert [compiler.command[0] for compiler in find_compilers()][1] == "/usr/bin/cc"


def test_a_machine_with_many_cpus_compiles_only_a_few_files_at_once(monkeypatch, tmp_path):
    """Each compiler takes memory, and a container may have little."""
    lock, at_a_time, most = threading.Lock(), 0, 0

    def execute(_, work, *arguments):
        nonlocal at_a_time, most
        with lock:
            at_a_time += 1
            most = max(most, at_a_time)
        time.sleep(0.05)
        with lock:
            at_a_time -= 1
        if "-shared" in arguments:
            (module.Path(work) / "library.so").touch()

    monkeypatch.setattr(module.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(Compiler, "_execute", execute)
    Compiler(("cc",), "a compiler").build(tmp_path / "library.so", ())
    assert 1 < most <= MAX_PARALLEL_FILES

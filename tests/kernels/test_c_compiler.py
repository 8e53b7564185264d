import shutil
import sys

import pytest
from loraserve_kernels import c_compiler as module
from loraserve_kernels.c_compiler import find_compilers


@pytest.fixture
def asked(monkeypatch):
    """A Mac with Homebrew's GCC as $CC. The compilers asked for their version."""
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


def test_a_mac_without_command_line_tools_is_spared_the_dialog(monkeypatch, asked):
    monkeypatch.setattr(module, "has_command_line_tools", lambda: False)
    assert [compiler.command for compiler in find_compilers()] == [("/opt/homebrew/bin/gcc-15",)]
    assert asked == ["/opt/homebrew/bin/gcc-15"]


def test_a_mac_with_command_line_tools_uses_them(monkeypatch, asked):
    monkeypatch.setattr(module, "has_command_line_tools", lambda: True)
    assert [compiler.command[0] for compiler in find_compilers()][1] == "/usr/bin/cc"

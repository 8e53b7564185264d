import subprocess

from loraserve_kernels import macos


def answer(monkeypatch, returncode, stdout=""):
    asked = []

    def run(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, returncode, stdout)

    monkeypatch.setattr(macos.subprocess, "run", run)
    return asked


def test_sysctl_returns_the_value_of_a_name(monkeypatch):
    asked = answer(monkeypatch, 0, "Apple M1\n")
    assert macos.sysctl("machdep.cpu.brand_string") == "Apple M1"
    assert asked == [("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")]


def test_sysctl_returns_an_empty_string_for_an_unknown_name(monkeypatch):
    answer(monkeypatch, 1)
    assert macos.sysctl("hw.perflevel0.logicalcpu") == ""


def test_sysctl_returns_an_empty_string_if_the_command_is_missing(monkeypatch):
    def missing(command, **options):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(macos.subprocess, "run", missing)
    assert macos.sysctl("machdep.cpu.brand_string") == ""


def test_command_line_tools_are_present_if_xcode_select_succeeds(monkeypatch):
    asked = answer(monkeypatch, 0, "/Library/Developer/CommandLineTools\n")
    assert macos.has_command_line_tools()
    answer(monkeypatch, 2)
    assert not macos.has_command_line_tools()
    assert asked == [("/usr/bin/xcode-select", "-p")]

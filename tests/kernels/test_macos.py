import subprocess

from loraserve_kernels import macos


def answer(monkeypatch, returncode, stdout=""):
    asked = []

    def run(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, returncode, stdout)

    monkeypatch.setattr(macos.subprocess, "run", run)
    return asked


def test_reads_a_value(monkeypatch):
    asked = answer(monkeypatch, 0, "Apple M1\n")
    assert macos.sysctl("machdep.cpu.brand_string") == "Apple M1"
    assert asked == [("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")]


def test_a_name_that_is_not_known_has_no_value(monkeypatch):
    answer(monkeypatch, 1)
    assert macos.sysctl("hw.perflevel0.logicalcpu") == ""


def test_without_sysctl_nothing_has_a_value(monkeypatch):
    def missing(command, **options):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(macos.subprocess, "run", missing)
    assert macos.sysctl("machdep.cpu.brand_string") == ""


def test_the_command_line_tools_are_there_if_xcode_select_succeeds(monkeypatch):
    asked = answer(monkeypatch, 0, "/Library/Developer/CommandLineTools\n")
    assert macos.has_command_line_tools()
    answer(monkeypatch, 2)
    assert not macos.has_command_line_tools()
    assert asked == [("/usr/bin/xcode-select", "-p")]

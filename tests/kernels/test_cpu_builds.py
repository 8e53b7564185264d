from pathlib import Path

from loraserve_kernels import cpu_builds as module
from loraserve_kernels.cpu_builds import cpu_description


def test_the_description_of_a_mac_names_its_cpu(monkeypatch):
    def no_cpuinfo(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", no_cpuinfo)
    monkeypatch.setattr(module, "sysctl", {"machdep.cpu.brand_string": "Apple M1"}.__getitem__)
    assert "Apple M1" in cpu_description()

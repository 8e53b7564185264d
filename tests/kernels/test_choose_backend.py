import pytest
import torch
from loraserve_kernels import choose_backend as module
from loraserve_kernels.choose_backend import choose_backend


@pytest.mark.parametrize("requested", ["auto", "triton"])
def test_triton_is_chosen_on_a_gpu(triton_device, requested):
    backend, reason = choose_backend("cuda", requested)
    assert backend.name == "triton"
    assert reason.startswith("triton: 3.")


def test_auto_never_chooses_triton_on_a_cpu(triton_device):
    assert choose_backend("cpu")[0].name != "triton"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not asked for where there is a GPU")
def test_on_a_cpu_triton_needs_its_interpreter(triton_device, monkeypatch):
    backend, reason = choose_backend("cpu", "triton")
    assert backend.name == "triton"
    assert reason.endswith("interpreted")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"device is cpu, expected cuda .* set TRITON_INTERPRET=1"):
        choose_backend("cpu", "triton")


class NoLauncher:
    """A driver whose launcher cannot be compiled or cached."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def get_current_target(self) -> None:
        raise self._error


@pytest.mark.parametrize("requested", ["auto", "triton"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("Failed to find C compiler."), r"on cuda \(Failed to find C compiler.*install gcc, libc6-dev"),
        (FileNotFoundError(2, "No such file", "cc"), r"on cuda \(.*'cc'\), .* install gcc"),
        (PermissionError(13, "Permission denied", "/.triton"), r"on cuda \(.*'/.triton'\), .* set TRITON_CACHE_DIR"),
        (OSError(30, "Read-only file system", "/.triton"), r"on cuda \(.*'/.triton'\), .* set TRITON_CACHE_DIR"),
    ],
)
def test_an_unusable_triton_launcher_is_reported_with_its_remedy(triton_device, monkeypatch, requested, error, message):
    from triton import knobs
    from triton.runtime import driver

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(driver, "_active", NoLauncher(error))
    with pytest.raises(ValueError, match=message):
        choose_backend("cuda", requested)


def test_a_gpu_too_old_for_triton_gets_the_reference_backend(triton_device, monkeypatch):
    """Otherwise Triton would fail at the first kernel it compiles, which would look like the model's fault."""
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    backend, reason = choose_backend("cuda:1")
    assert backend.name == "reference"
    assert reason.startswith("reference: cuda:1 has compute capability 7.5, the triton backend needs 8.0 or newer")
    with pytest.raises(ValueError, match=r"cuda:1 has .* 7\.5, .* needs 8\.0 .*use auto or reference"):
        choose_backend("cuda:1", "triton")


def test_triton_is_refused_on_other_devices(triton_device):
    with pytest.raises(ValueError, match="device is meta"):
        choose_backend("meta", "triton")
    assert choose_backend("meta")[0].name == "reference"


def test_without_triton_a_gpu_gets_the_reference_backend(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    backend, reason = choose_backend("cuda")
    assert backend.name == "reference"
    assert "pip install triton" in reason
    with pytest.raises(ValueError, match="needs triton, which is not installed"):
        choose_backend("cuda", "triton")

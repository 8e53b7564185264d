import pytest
import torch

from loraserve.engine.accelerator import accelerator_of, choose_device


@pytest.mark.parametrize(
    ("requested", "num_gpus", "expected"),
    [("auto", 0, "cpu"), ("auto", 2, "cpu"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda:0"), ("cuda:1", 2, "cuda:1")],
)
def test_a_gpu_is_taken_when_asked_for(requested: str, num_gpus: int, expected: str) -> None:
    assert choose_device(requested, num_gpus) == torch.device(expected)


@pytest.mark.parametrize(
    ("requested", "num_gpus", "message"),
    [
        ("cuda", 0, "--device cuda cannot be used: .*; choose cpu"),
        ("cuda:2", 2, "--device cuda:2 does not exist: there are 2 GPUs, from cuda:0 on"),
        ("mps", 2, "--device mps is not supported: choose auto, cpu, cuda or cuda:<number>"),
        ("cuda:", 2, "--device cuda: is not supported"),
        ("cuda:-1", 2, "--device cuda:-1 is not supported"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_is(requested: str, num_gpus: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_device(requested, num_gpus)


def test_a_cpu_needs_no_accelerator() -> None:
    assert accelerator_of(torch.device("cpu")) is None

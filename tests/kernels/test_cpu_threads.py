"""Torch and our CPU ops may use different numbers of threads."""

from collections.abc import Iterator

import pytest
import torch
from loraserve_kernels.cpu_threads import num_threads, torch_on_one_thread


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_ops_use_as_many_threads_as_torch() -> None:
    assert num_threads() == 3
    torch.set_num_threads(2)
    assert num_threads() == 2


def test_torch_uses_one_thread_in_the_block_and_ops_all() -> None:
    for expected in (3, 2):
        torch.set_num_threads(expected)
        with torch_on_one_thread():
            assert (torch.get_num_threads(), num_threads()) == (1, expected)
        assert (torch.get_num_threads(), num_threads()) == (expected, expected)


def test_the_number_of_threads_is_restored_after_an_exception() -> None:
    with pytest.raises(RuntimeError, match="failed"), torch_on_one_thread():
        raise RuntimeError("failed")
    assert (torch.get_num_threads(), num_threads()) == (3, 3)
    torch.set_num_threads(2)
    assert num_threads() == 2, "again torch's"

import numpy as np
import pytest

from loraserve.engine.device.step_buffers import BufferSpec, StepBuffers
from tests.support.host_accelerator import HostAccelerator

SPECS = [BufferSpec((5,), np.int32), BufferSpec((3,), np.int64), BufferSpec((2, 4), np.int32)]


def test_without_an_accelerator_tensors_share_the_arrays_memory() -> None:
    for buffer in StepBuffers(SPECS, None).buffers:
        buffer.array.fill(7)
        assert buffer.tensor.unique().tolist() == [7]
        assert buffer.tensor.shape == buffer.array.shape


def test_every_buffer_is_aligned_for_vector_loads() -> None:
    buffers = StepBuffers(SPECS, HostAccelerator()).buffers
    first = buffers[0].tensor.data_ptr()
    assert [(buffer.tensor.data_ptr() - first) % 256 for buffer in buffers] == [0, 0, 0]


def test_tensors_have_the_values_of_the_last_upload_up_to_its_end() -> None:
    buffers = StepBuffers(SPECS, HostAccelerator())
    ids, rows, table = buffers.buffers
    for buffer in (ids, rows, table):
        buffer.array.fill(7)
    buffers.upload(table.end_bytes(1))
    for buffer in (ids, rows, table):
        buffer.array.fill(8)
    assert ids.tensor.tolist() == [7] * 5
    assert rows.tensor.tolist() == [7] * 3
    assert table.tensor.tolist() == [[7] * 4, [0] * 4]


def test_wait_blocks_only_for_an_upload_in_progress() -> None:
    accelerator = HostAccelerator()
    buffers = StepBuffers(SPECS, accelerator)
    buffers.wait()
    buffers.upload(8)
    assert [event.is_done for event in accelerator.events] == [False]
    buffers.wait()
    assert [event.is_done for event in accelerator.events] == [True]


def test_an_upload_without_a_device_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError):
        StepBuffers(SPECS, None).upload(8)

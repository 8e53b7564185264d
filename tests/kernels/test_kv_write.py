import dataclasses

import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.kv_write import KvWriteInputs, make_kv_write_inputs


def run(backend, inputs: KvWriteInputs) -> None:
    backend.kv_write(inputs.k, inputs.v, inputs.k_cache, inputs.v_cache, inputs.slot_mapping)


@pytest.mark.parametrize(
    ("num_rows", "heads", "head_dim", "block_size"), [(1, 1, 8, 16), (37, 3, 40, 7), (700, 4, 64, 16), (0, 2, 8, 16)]
)
def test_stores_each_row_in_its_slot_and_nothing_else(backend, device, dtype, num_rows, heads, head_dim, block_size):
    inputs = make_kv_write_inputs(num_rows, heads, head_dim, block_size, dtype, device)
    run(backend, inputs)
    for rows, cache in ((inputs.k, inputs.k_cache), (inputs.v, inputs.v_cache)):
        by_slot = cache.transpose(1, 2).flatten(0, 1)
        assert torch.equal(by_slot[inputs.slot_mapping], rows)
        unused = torch.ones(by_slot.shape[0], dtype=torch.bool, device=device)
        unused[inputs.slot_mapping] = False
        assert by_slot[unused].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: {"k": i.k[:2]}, "k is"),
        (lambda i: {"v": i.v.half()}, "v.dtype"),
        (lambda i: {"v_cache": i.v_cache[:1]}, "v_cache is"),
        (lambda i: {"slot_mapping": i.slot_mapping.int()}, "slot_mapping.dtype"),
    ],
)
def test_refuses_wrong_shapes_and_dtypes(backend, device, change, message):
    inputs = make_kv_write_inputs(5, 2, 16, device=device)
    with pytest.raises(ValueError, match=message):
        run(backend, dataclasses.replace(inputs, **change(inputs)))


@pytest.mark.parametrize("slot", [-1, 3 * 16])
def test_c_refuses_a_slot_outside_the_cache_and_writes_nothing(cpu_library, slot):
    inputs = make_kv_write_inputs(5, 2, 16)
    inputs.slot_mapping[3] = slot
    with pytest.raises(ValueError, match="slot_mapping"):
        run(CpuBackend(cpu_library), inputs)
    assert inputs.k_cache.isnan().all()


def test_triton_skips_the_padding_of_a_captured_graph(triton_device):
    from loraserve_kernels.triton_ops.kv_write import kv_write

    inputs = make_kv_write_inputs(5, 2, 16, device=triton_device)
    slots = inputs.slot_mapping.clone()
    inputs.slot_mapping[[1, 4]] = -1
    kv_write(inputs.k, inputs.v, inputs.k_cache, inputs.v_cache, inputs.slot_mapping)
    for rows, cache in ((inputs.k, inputs.k_cache), (inputs.v, inputs.v_cache)):
        by_slot = cache.transpose(1, 2).flatten(0, 1)
        assert torch.equal(by_slot[slots[[0, 2, 3]]], rows[[0, 2, 3]])
        assert by_slot.isnan().all(dim=(1, 2)).sum() == len(by_slot) - 3

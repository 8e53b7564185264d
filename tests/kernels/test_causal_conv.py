import dataclasses

import pytest
import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.causal_conv import CausalConvInputs, make_causal_conv_inputs
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.recurrent import sequence_rows

from tests.support.recurrent_cases import (
    BAD_STEPS,
    RAGGED,
    require_refused,
    require_same_bits_in_any_batch,
    require_unchanged,
    same_bits,
)


def run(backend: Backend, i: CausalConvInputs, *, silu: bool = True) -> torch.Tensor:
    return backend.causal_conv(i.x, i.weight, i.bias, i.state, i.batch, silu=silu)


def expected_output(i: CausalConvInputs, *, silu: bool = True) -> torch.Tensor:
    """In float64, tap by tap."""
    out = torch.empty(i.x.shape, dtype=torch.float64, device=i.x.device)
    num_before = i.weight.shape[1] - 1
    for rows in sequence_rows(i.batch, len(i.state)):
        before = torch.zeros_like(i.state[0]) if rows.read < 0 else i.state[rows.read]
        inputs = torch.cat([before, i.x[rows.first_row : rows.end_row]]).double()
        total = torch.zeros_like(inputs[num_before:])
        for tap in range(num_before + 1):
            total += inputs[tap : tap + len(total)] * i.weight[:, tap].double()
        if i.bias is not None:
            total += i.bias.double()
        out[rows.first_row : rows.end_row] = total * torch.sigmoid(total) if silu else total
    return out


def expected_state(i: CausalConvInputs) -> torch.Tensor:
    """The last rows, with those before the step if it has too few."""
    state, num_before = i.state.clone(), i.weight.shape[1] - 1
    for rows in sequence_rows(i.batch, len(i.state)):
        before = torch.zeros_like(i.state[0]) if rows.read < 0 else i.state[rows.read]
        inputs = torch.cat([before, i.x[rows.first_row : rows.end_row]])
        if rows.save >= 0:
            state[rows.save] = inputs[rows.num_rows_saved :][:num_before]
        state[rows.write] = inputs[-num_before:]
    return state


@pytest.mark.parametrize(
    ("num_rows", "num_channels", "kernel_size"),
    [
        ([1], 1, 2),
        (RAGGED, 700, 4),
        (RAGGED, 37, 3),
        ([3, 1, 2], 513, 7),
        ([2, 20, 2], 70, 16),
        ([2, 20, 2], 40, 17),
    ],
)
@pytest.mark.parametrize("silu", [False, True])
def test_convolves_each_sequence_and_keeps_its_last_rows(
    backend, device, dtype, assert_close, num_rows, num_channels, kernel_size, silu
):
    inputs = make_causal_conv_inputs(num_rows, num_channels, kernel_size, dtype, device, has_bias=silu)
    expected, state, before = expected_output(inputs, silu=silu), expected_state(inputs), inputs.state.clone()
    actual = run(backend, inputs, silu=silu)
    assert actual.is_contiguous()
    assert_close(actual, expected)
    assert same_bits(inputs.state, state)
    require_unchanged(inputs.state, before, inputs.batch)


def test_channels_may_be_rows_of_the_input(backend, device, dtype, assert_close):
    inputs = make_causal_conv_inputs([3, 9], 70, 4, dtype, device)
    inputs.x = inputs.x.t().contiguous().t()
    expected = expected_output(inputs)
    assert_close(run(backend, inputs), expected)


def test_a_sequence_without_rows_keeps_its_state(backend, device):
    inputs = make_causal_conv_inputs([2, 0], 37, 4, device=device)
    inputs.batch.state_slots.save.fill_(-1)
    state = expected_state(inputs)
    run(backend, inputs)
    assert same_bits(inputs.state, state)


@pytest.mark.parametrize("kernel_size", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_sequence_gets_the_same_bits_in_any_batch(lanes_library, dtype, kernel_size):
    inputs = make_causal_conv_inputs([60], 1100, kernel_size, dtype, has_bias=True)
    state = torch.randn(8, kernel_size - 1, 1100).to(dtype)
    cpu = CpuBackend(lanes_library)
    require_same_bits_in_any_batch(
        lambda rows, batch, state: run(cpu, dataclasses.replace(inputs, x=inputs.x[rows], state=state, batch=batch)),
        state,
    )


def test_the_tolerance_catches_reversed_taps(backend, device, dtype, assert_close):
    inputs = make_causal_conv_inputs([4], 64, 4, dtype, device)
    wrong = expected_output(dataclasses.replace(inputs, weight=inputs.weight.flip(1)))
    with pytest.raises(AssertionError):
        assert_close(run(backend, inputs), wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: {"x": i.x[:, 1:]}, "x and weight"),
        (lambda i: {"weight": i.weight[:, :1]}, "x and weight"),
        (lambda i: {"weight": i.weight.half()}, "weight.dtype"),
        (lambda i: {"bias": i.weight[1:, 0]}, "bias is"),
        (lambda i: {"state": i.state[:, 1:]}, "state is"),
        (lambda i: {"state": i.state.half()}, "state.dtype"),
        (lambda i: {"batch": dataclasses.replace(i.batch, state_slots=None)}, "state_slots"),
        (lambda i: {"batch": dataclasses.replace(i.batch, num_rows=i.batch.num_rows.long())}, "num_rows.dtype"),
        (lambda i: {"batch": dataclasses.replace(i.batch, row_start=i.batch.row_start[:1])}, "row_start is"),
    ],
)
def test_refuses_wrong_shapes_and_dtypes(backend, device, change, message):
    inputs = make_causal_conv_inputs([2, 3], 64, device=device)
    with pytest.raises(ValueError, match=message):
        run(backend, dataclasses.replace(inputs, **change(inputs)))


@pytest.mark.parametrize("name", BAD_STEPS)
def test_c_refuses_slots_and_rows_that_do_not_exist_and_writes_nothing(cpu, name):
    inputs = make_causal_conv_inputs([6], 64)
    require_refused(
        lambda rows, batch, state: run(cpu, dataclasses.replace(inputs, state=state, batch=batch)),
        torch.randn(8, 3, 64),
        name,
    )

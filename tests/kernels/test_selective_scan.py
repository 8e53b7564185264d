import dataclasses
import math

import pytest
import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.recurrent import SequenceRows
from loraserve_kernels.selective_scan import SelectiveScanInputs, make_selective_scan_inputs
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor

from tests.support.recurrent_cases import (
    BAD_STEPS,
    RAGGED,
    expected_states,
    require_refused,
    require_same_bits_in_any_batch,
    require_unchanged,
    same_bits,
)

ANY = (0.0, math.inf)


def run(
    backend: Backend, i: SelectiveScanInputs, *, softplus: bool = True, dt_limit: tuple[float, float] = ANY
) -> Tensor:
    return backend.selective_scan(
        i.x, i.dt, i.a, i.b, i.c, i.d, i.dt_bias, i.state, i.batch, softplus=softplus, dt_limit=dt_limit
    )


def expected(
    i: SelectiveScanInputs, *, softplus: bool = True, dt_limit: tuple[float, float] = ANY
) -> tuple[Tensor, Tensor]:
    """(Output, states) in float64, head by head."""
    out = torch.full(i.x.shape, float("nan"), dtype=torch.float64, device=i.x.device)
    x, b, c, a, dt = (tensor.double() for tensor in (i.x, i.b, i.c, i.a, i.dt))
    if i.dt_bias is not None:
        dt = dt + i.dt_bias.double()
    if softplus:
        dt = dt.exp().log1p()
    dt = dt.clamp(*dt_limit)

    def one_sequence(rows: SequenceRows, before: Tensor) -> list[Tensor]:
        states, state = [], before.clone()
        for row in range(rows.first_row, rows.end_row):
            state = state.clone()
            for head in range(x.shape[1]):
                group = head // (x.shape[1] // b.shape[1])
                state[head] *= (dt[row, head] * a[head]).exp()
                state[head] += torch.outer(dt[row, head] * x[row, head], b[row, group])
                out[row, head] = state[head] @ c[row, group]
                if i.d is not None:
                    out[row, head] += i.d[head].double() * x[row, head]
            states.append(state)
        return states

    return out, expected_states(i.state, i.batch, one_sequence)


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_groups", "head_dim", "state_dim"),
    [
        ([1], 1, 1, 1, 1),
        (RAGGED, 4, 2, 16, 40),
        ([3, 20, 1], 2, 1, 64, 128),
        ([3, 2], 3, 3, 37, 83),
        ([3, 2], 2, 2, 8, 208),
    ],
)
@pytest.mark.parametrize("has_d", [False, True])
def test_updates_the_state_and_reads_it_for_each_row(
    backend, device, dtype, assert_close, num_rows, num_heads, num_groups, head_dim, state_dim, has_d
):
    inputs = make_selective_scan_inputs(
        num_rows, num_heads, num_groups, head_dim, state_dim, dtype, device, has_d=has_d
    )
    inputs.b, inputs.c = inputs.b / state_dim**0.5, inputs.c / state_dim**0.5
    (out, state), before = expected(inputs), inputs.state.clone()
    actual = run(backend, inputs)
    assert actual.is_contiguous()
    assert_close(actual, out)
    used = ~state.isnan()
    assert_close(inputs.state[used], state[used])
    require_unchanged(inputs.state, before, inputs.batch)


@pytest.mark.parametrize(("softplus", "dt_limit"), [(False, (0.0, 0.5)), (True, (0.3, 0.8)), (True, (0.0, 0.1))])
def test_step_sizes_are_limited(backend, device, dtype, assert_close, softplus, dt_limit):
    inputs = make_selective_scan_inputs([2, 25], 2, 1, 16, 24, dtype, device)
    inputs.b, inputs.c = inputs.b / 5, inputs.c / 5
    out, _ = expected(inputs, softplus=softplus, dt_limit=dt_limit)
    assert_close(run(backend, inputs, softplus=softplus, dt_limit=dt_limit), out)


def test_step_sizes_and_decays_of_any_size_are_allowed(backend, device, assert_close):
    inputs = make_selective_scan_inputs([40], 2, 1, 16, 24, device=device)
    inputs.dt = torch.linspace(-100, 100, 80, device=device).view(40, 2)
    inputs.dt_bias, inputs.x = None, inputs.x / 100
    inputs.b, inputs.c = inputs.b / 5, inputs.c / 5
    out, state = expected(inputs)
    assert_close(run(backend, inputs), out)
    used = ~state.isnan()
    assert_close(inputs.state[used], state[used])


def test_a_sequence_without_rows_keeps_its_state(backend, device):
    inputs = make_selective_scan_inputs([2, 0], 2, 1, 16, 24, device=device)
    slots = inputs.batch.state_slots
    slots.save.fill_(-1)
    before = inputs.state[int(slots.read[1])].clone()
    run(backend, inputs)
    assert same_bits(inputs.state[int(slots.write[1])], before)


@pytest.mark.parametrize("state_dim", [84, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_sequence_gets_the_same_bits_in_any_batch(lanes_library, dtype, state_dim):
    inputs = make_selective_scan_inputs([60], 4, 2, 41, state_dim, dtype)
    cpu = CpuBackend(lanes_library)

    def step(rows: slice, batch: StepBatch, state: Tensor) -> Tensor:
        parts = {name: getattr(inputs, name)[rows] for name in ("x", "dt", "b", "c")}
        return run(cpu, dataclasses.replace(inputs, **parts, state=state, batch=batch))

    require_same_bits_in_any_batch(step, torch.randn(8, 4, 41, state_dim))


@pytest.mark.parametrize("name", ["x", "dt", "a", "b", "c", "d", "dt_bias"])
def test_the_tolerance_catches_an_input_that_is_five_percent_off(backend, device, dtype, assert_close, name):
    inputs = make_selective_scan_inputs([20], 2, 1, 16, 24, dtype, device)
    inputs.b, inputs.c = inputs.b / 5, inputs.c / 5
    wrong, _ = expected(dataclasses.replace(inputs, **{name: getattr(inputs, name) * 1.05}))
    with pytest.raises(AssertionError):
        assert_close(run(backend, inputs), wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: {"x": i.x[:, :3]}, "x, b and c"),
        (lambda i: {"b": i.b[1:]}, "x, b and c"),
        (lambda i: {"c": i.c[:, :, 1:]}, "x, b and c"),
        (lambda i: {"x": i.x.half()}, "b.dtype"),
        (lambda i: {"dt": i.dt.half()}, "dt.dtype"),
        (lambda i: {"dt": i.dt[:, 1:]}, "dt is"),
        (lambda i: {"a": i.a[1:]}, "a is"),
        (lambda i: {"d": i.d[1:]}, "d is"),
        (lambda i: {"dt_bias": i.dt_bias[1:]}, "dt_bias is"),
        (lambda i: {"state": i.state[:, 1:]}, "state is"),
        (lambda i: {"state": i.state.half()}, "state.dtype"),
        (lambda i: {"batch": dataclasses.replace(i.batch, state_slots=None)}, "state_slots"),
    ],
)
def test_refuses_wrong_shapes_and_dtypes(backend, device, change, message):
    inputs = make_selective_scan_inputs([2, 3], 4, 2, 16, 24, device=device)
    with pytest.raises(ValueError, match=message):
        run(backend, dataclasses.replace(inputs, **change(inputs)))


@pytest.mark.parametrize("name", BAD_STEPS)
def test_c_refuses_slots_and_rows_that_do_not_exist_and_writes_nothing(cpu, name):
    inputs = make_selective_scan_inputs([6], 4, 2, 16, 24)
    require_refused(
        lambda rows, batch, state: run(cpu, dataclasses.replace(inputs, state=state, batch=batch)),
        torch.randn(8, 4, 16, 24),
        name,
    )

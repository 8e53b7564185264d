import dataclasses

import pytest
import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.gated_delta_rule import GatedDeltaRuleInputs, make_gated_delta_rule_inputs
from loraserve_kernels.recurrent import SequenceRows
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


def run(backend: Backend, i: GatedDeltaRuleInputs, *, normalize: bool = True) -> Tensor:
    return backend.gated_delta_rule(i.q, i.k, i.v, i.log_decay, i.beta, i.state, i.batch, normalize=normalize)


def expected(i: GatedDeltaRuleInputs, *, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """(Output, states) in float64, head by head."""
    out = torch.full(i.v.shape, float("nan"), dtype=torch.float64, device=i.v.device)
    q, k, v, beta, decay = (tensor.double() for tensor in (i.q, i.k, i.v, i.beta, i.log_decay))
    if normalize:
        q, k = (heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt() for heads in (q, k))

    def one_sequence(rows: SequenceRows, before: Tensor) -> list[Tensor]:
        states, state = [], before.clone()
        for row in range(rows.first_row, rows.end_row):
            state = state.clone()
            for head in range(v.shape[1]):
                of_key = head // (v.shape[1] // k.shape[1])
                state[head] *= decay[row, head].exp()
                change = beta[row, head] * (v[row, head] - k[row, of_key] @ state[head])
                state[head] += torch.outer(k[row, of_key], change)
                out[row, head] = q[row, of_key] @ state[head] / k.shape[2] ** 0.5
            states.append(state)
        return states

    return out, expected_states(i.state, i.batch, one_sequence)


@pytest.mark.parametrize(
    ("num_rows", "num_k_heads", "num_v_heads", "k_dim", "v_dim"),
    [
        ([1], 1, 1, 1, 1),
        (RAGGED, 2, 4, 16, 40),
        ([3, 40, 1], 1, 1, 128, 128),
        ([3, 2], 3, 3, 37, 83),
    ],
)
def test_updates_the_state_and_reads_it_for_each_row(
    backend, device, dtype, assert_close, num_rows, num_k_heads, num_v_heads, k_dim, v_dim
):
    inputs = make_gated_delta_rule_inputs(num_rows, num_k_heads, num_v_heads, k_dim, v_dim, dtype, device)
    (out, state), before = expected(inputs), inputs.state.clone()
    actual = run(backend, inputs)
    assert actual.is_contiguous()
    assert_close(actual, out)
    used = ~state.isnan()
    assert_close(inputs.state[used], state[used])
    require_unchanged(inputs.state, before, inputs.batch)


def test_without_normalization_q_and_k_are_used_as_they_are(backend, device, dtype, assert_close):
    inputs = make_gated_delta_rule_inputs([2, 5], 1, 2, 16, 24, dtype, device)
    inputs.q, inputs.k = inputs.q / 4, inputs.k / 4
    out, _ = expected(inputs, normalize=False)
    assert_close(run(backend, inputs, normalize=False), out)


def test_decays_of_any_size_are_allowed(backend, device, assert_close):
    inputs = make_gated_delta_rule_inputs([4, 4], 1, 2, 16, 24, device=device)
    inputs.log_decay[1::4] = -1000
    inputs.log_decay[2::4] = 0
    out, state = expected(inputs)
    assert_close(run(backend, inputs), out)
    used = ~state.isnan()
    assert_close(inputs.state[used], state[used])


def test_a_sequence_without_rows_keeps_its_state(backend, device):
    inputs = make_gated_delta_rule_inputs([2, 0], 1, 2, 16, 24, device=device)
    slots = inputs.batch.state_slots
    slots.save.fill_(-1)
    before = inputs.state[int(slots.read[1])].clone()
    run(backend, inputs)
    assert same_bits(inputs.state[int(slots.write[1])], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_sequence_gets_the_same_bits_in_any_batch(lanes_library, dtype):
    inputs = make_gated_delta_rule_inputs([60], 2, 4, 40, 84, dtype)
    cpu = CpuBackend(lanes_library)

    def step(rows: slice, batch, state: Tensor) -> Tensor:
        parts = {name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "log_decay", "beta")}
        return run(cpu, dataclasses.replace(inputs, **parts, state=state, batch=batch))

    require_same_bits_in_any_batch(step, torch.randn(8, 4, 40, 84))


@pytest.mark.parametrize("name", ["q", "k", "v", "log_decay", "beta"])
def test_the_tolerance_catches_an_input_that_is_five_percent_off(backend, device, dtype, assert_close, name):
    inputs = make_gated_delta_rule_inputs([40], 1, 1, 16, 32, dtype, device)
    inputs.q, inputs.k = inputs.q / 4, inputs.k / 4
    off = {name: getattr(inputs, name) * 1.05}
    wrong, _ = expected(dataclasses.replace(inputs, **off), normalize=False)
    with pytest.raises(AssertionError):
        assert_close(run(backend, inputs, normalize=False), wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: {"q": i.q[:, :, 1:]}, "q, k and v"),
        (lambda i: {"k": i.k[1:]}, "q, k and v"),
        (lambda i: {"v": i.v[:, :3]}, "q, k and v"),
        (lambda i: {"k": i.k.half()}, "k.dtype"),
        (lambda i: {"v": i.v.half()}, "q.dtype"),
        (lambda i: {"beta": i.beta.half()}, "beta.dtype"),
        (lambda i: {"beta": i.beta[:, 1:]}, "beta is"),
        (lambda i: {"log_decay": i.log_decay.half()}, "log_decay.dtype"),
        (lambda i: {"state": i.state[:, 1:]}, "state is"),
        (lambda i: {"state": i.state.half()}, "state.dtype"),
        (lambda i: {"batch": dataclasses.replace(i.batch, state_slots=None)}, "state_slots"),
    ],
)
def test_refuses_wrong_shapes_and_dtypes(backend, device, change, message):
    inputs = make_gated_delta_rule_inputs([2, 3], 2, 4, 16, 24, device=device)
    with pytest.raises(ValueError, match=message):
        run(backend, dataclasses.replace(inputs, **change(inputs)))


@pytest.mark.parametrize("name", BAD_STEPS)
def test_c_refuses_slots_and_rows_that_do_not_exist_and_writes_nothing(cpu, name):
    inputs = make_gated_delta_rule_inputs([6], 2, 4, 16, 24)
    require_refused(
        lambda rows, batch, state: run(cpu, dataclasses.replace(inputs, state=state, batch=batch)),
        torch.randn(8, 4, 16, 24),
        name,
    )

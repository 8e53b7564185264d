"""One contract for both implementations of `LogitRows`; the torch one runs on the CPU too.

On a GPU: `tests/inference/test_gpu_logit_rows.py`.
"""

import numpy as np
import pytest
import torch
from loraserve_kernels.argmax import argmax_reference

from loraserve.engine.logit_rows import DeviceRows, LogitRows, open_rows


def open_device_rows(logits: torch.Tensor, vocab_size: int) -> LogitRows:
    return DeviceRows(logits[:, :vocab_size])


@pytest.fixture(params=["numpy", "torch"])
def open_any(request):
    return open_rows if request.param == "numpy" else open_device_rows


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=[1, 63, 64, 65, 1000, 1024])
def vocab_size(request):
    return request.param


@pytest.fixture
def logits(dtype, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    padded = torch.full((5, vocab_size + 3), torch.inf)
    padded[:, :vocab_size] = torch.randn(5, vocab_size, generator=generator) * 3
    return padded.to(dtype)


@pytest.fixture
def rows(open_any, logits, vocab_size):
    return open_any(logits, vocab_size)


@pytest.fixture
def expected(logits, vocab_size):
    return logits[:, :vocab_size].double().numpy()


IDS = np.array([3, 0, 4])


def lanes_of(expected, num_lanes):
    return [expected[:, lane::num_lanes] for lane in range(num_lanes)]


def test_argmax_is_the_first_of_the_largest(rows, expected):
    token_ids, values = rows.argmax()

    assert token_ids.tolist() == expected.argmax(1).tolist()
    assert values.tolist() == expected.max(1).tolist()


def test_argmax_prefers_the_lower_id_and_shows_nan(open_any, dtype):
    logits = torch.zeros(2, 300, dtype=dtype)
    logits[0, [290, 17, 100]] = 5
    logits[1, 70] = torch.nan

    token_ids, values = open_any(logits, 300).argmax()

    assert token_ids[0] == 17
    assert np.isnan(values[1])


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 3.0, 3.0, -2.0],
        [-4.0, -1.0, -1.0, -2.0],
        [-4.0, -0.0, 0.0, -2.0],
        [1.0, float("inf"), 2.0, 3.0],
        [float("-inf")] * 4,
        [1.0, 2.0, float("nan"), 3.0],
        [1.0, 2.0, -float("nan"), float("inf")],
    ],
)
def test_argmax_agrees_with_the_backends(open_any, dtype, values):
    """Each row alone and beside one that has nothing special."""
    logits = torch.tensor([values, [1.0, 2.0, 3.0, 2.0]]).to(dtype)
    for rows in (logits[:1], logits, logits[1:]):
        token_ids, peaks = open_any(rows, 4).argmax()
        assert (token_ids.tolist(), np.isfinite(peaks).tolist()) == argmax_reference(rows, 4)


def test_argmax_sees_a_nan_of_negative_sign(open_any):
    bits = torch.tensor([[0x3F80, 0xFFC0 - 0x10000, 0x4000]], dtype=torch.int16)
    token_ids, peaks = open_any(bits.view(torch.bfloat16), 3).argmax()
    assert token_ids.tolist() == [1]
    assert np.isnan(peaks).all()


def test_argmax_of_rows_without_a_positive_logit(open_any, dtype):
    logits = torch.full((4, 300), -3.0, dtype=dtype)
    logits[0, [40, 41]] = -1
    logits[1, 60], logits[1, 61] = -0.0, 0.0
    logits[2] = -torch.inf
    logits[3, 9], logits[3, 200] = 7, -torch.tensor(torch.nan).abs()

    token_ids, values = open_any(logits, 300).argmax()

    assert token_ids.tolist()[:3] == [40, 60, 0]
    assert values.tolist()[:3] == [-1, 0, -np.inf]
    assert token_ids[3] == 200
    assert np.isnan(values[3])


def test_lane_max(rows, expected):
    maxima = rows.lane_max(IDS)

    assert maxima.tolist() == np.stack([lane.max(1) for lane in lanes_of(expected, rows.num_lanes)], 1)[IDS].tolist()


def test_lane_mass_sums_what_reaches_the_floor(rows, expected):
    peaks = expected.max(1)[IDS].astype(np.float32)
    temperatures = np.array([0.5, 1, 2], dtype=np.float32)
    floors = np.array([-np.inf, -1, 0.5], dtype=np.float32)

    masses = rows.lane_mass(IDS, peaks, temperatures, floors)

    weights = np.exp((expected[IDS] - peaks[:, None]) / temperatures[:, None]) * (expected[IDS] >= floors[:, None])
    wanted = np.stack([lane.sum(1) for lane in lanes_of(weights, rows.num_lanes)], 1)
    np.testing.assert_allclose(masses, wanted, rtol=1e-5)


def test_at_least_is_ordered_by_row_then_token(rows, expected):
    thresholds = np.array([-np.inf, 0, 3], dtype=np.float32)

    indices, token_ids, values = rows.at_least(IDS, thresholds)

    wanted = np.nonzero(expected[IDS] >= thresholds[:, None])
    assert (indices.tolist(), token_ids.tolist()) == (wanted[0].tolist(), wanted[1].tolist())
    assert values.tolist() == expected[IDS][wanted].tolist()


def test_count_above_leaves_out_equals(rows, expected):
    values = np.array([expected[row_id, 0] for row_id in IDS], dtype=np.float32)

    counts = rows.count_above(IDS, values)

    assert counts.tolist() == (expected[IDS] > values[:, None]).sum(1).tolist()


def test_copies_are_written_to_and_originals_are_not(rows, expected, logits):
    before = logits.clone()
    copy = rows.copy_rows(IDS, np.array([False, True, False]))

    copy.put(np.array([0, 1]), np.array([0, 0]), np.array([1.5, 2.5], dtype=np.float32))

    everything = copy.at_least(np.arange(3), np.full(3, -np.inf, dtype=np.float32))[2].reshape(3, -1)
    wanted = expected[IDS]
    wanted[1] = -np.inf
    wanted[[0, 1], [0, 0]] = [1.5, 2.5]
    assert everything.tolist() == wanted.tolist()
    assert torch.equal(logits, before)


def test_gather_keeps_the_shape(rows, expected):
    row_ids = np.array([[4, 0], [1, 1]])

    assert rows.gather(row_ids, np.zeros_like(row_ids)).tolist() == expected[row_ids, 0].tolist()


def test_float16_is_widened():
    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(0)).half()
    row_ids = np.array([[0, 2], [1, 1]])
    expected = logits.float().numpy()[row_ids, 7]

    assert open_rows(logits, 80).gather(row_ids, np.full_like(row_ids, 7)).tolist() == expected.tolist()


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="float64"):
        open_rows(torch.zeros(1, 4, dtype=torch.float64), 4)

"""Compares the sampler with float64 references that apply one operation after another to a whole row."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.host_sampling import ReferenceSampling
from loraserve_kernels.sampling_noise import uniform

from loraserve.engine.request import SamplingParams
from loraserve.engine.sampling.row import PenaltyState, SamplingRow
from loraserve.engine.sampling.sampler import Sampler

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
RANDOM = SamplingParams(max_tokens=64, temperature=0.8)
EOS = (2, 3)


def make_row(params, *, seed=0, position=0, prompt=(), output=(), eos=EOS, state=None):
    return SamplingRow(params, seed, position, prompt, output, eos, state)


def make_logits(num_rows, vocab_size, seed=0, scale=2.0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def make_sampler(vocab_size, logits_size, host=None):
    return Sampler(vocab_size, logits_size, host or default_host())


def sample(logits, rows, vocab_size=None, host=None):
    return make_sampler(vocab_size or logits.shape[1], logits.shape[1], host).sample(logits, rows)


def default_host():
    """The host functions of the test's `backend`."""
    return ReferenceSampling()


def host_in_c():
    found, reason = choose_backend("cpu")
    if found.name != "cpu":
        pytest.skip(f"no C functions here ({reason})")
    return found


class Recorder:
    """A host's functions, with a record of the calls."""

    def __init__(self, host):
        self.calls = []
        for name in ("argmax", "draw", "draw_edited", "score"):
            setattr(self, name, self.recorded(name, getattr(host, name)))

    def recorded(self, name, function):
        return lambda *args: self.calls.append(name) or function(*args)


def sample_one(logits, params, **row):
    return sample(logits, [make_row(params, **row)]).token_ids[0]


@pytest.fixture(params=["reference", "c"])
def backend(request, monkeypatch):
    """Runs the test with the reference and with the C functions, which must give the same results."""
    if request.param == "c":
        host = host_in_c()
        monkeypatch.setattr(sys.modules[__name__], "default_host", lambda: host)


# References.


def edited_logits(row: SamplingRow, logits: np.ndarray) -> np.ndarray:
    params = row.params
    edited = logits.astype(np.float64)
    if params.allowed_token_ids:
        for token_id in range(len(edited)):
            if token_id not in params.allowed_token_ids:
                edited[token_id] = -np.inf
    for token_id, bias in params.logit_bias.items():
        edited[token_id] += bias
    if len(row.output_token_ids) < params.min_tokens:
        edited[[*row.eos_token_ids, *params.stop_token_ids]] = -np.inf
    for token_id in {*row.prompt_token_ids, *row.output_token_ids}:
        if edited[token_id] > 0:
            edited[token_id] /= params.repetition_penalty
        else:
            edited[token_id] *= params.repetition_penalty
    for token_id in set(row.output_token_ids):
        edited[token_id] -= params.frequency_penalty * list(row.output_token_ids).count(token_id)
        edited[token_id] -= params.presence_penalty
    return edited


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def by_falling(values: np.ndarray) -> np.ndarray:
    """Token ids by descending value; equal values by ascending id."""
    return np.argsort(-values, kind="stable")


def kept_probabilities(row: SamplingRow, logits: np.ndarray) -> np.ndarray:
    params = row.params
    scaled = edited_logits(row, logits) / params.temperature
    scaled[softmax(scaled) < params.min_p * softmax(scaled).max()] = -np.inf
    order = by_falling(scaled)
    if params.top_k:
        scaled[order[params.top_k :]] = -np.inf
    probabilities = softmax(scaled)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    if params.top_p < 1:
        scaled[order[before >= params.top_p]] = -np.inf
    return softmax(scaled)


def reference_sorted_choice(row: SamplingRow, logits: np.ndarray) -> int:
    probabilities = kept_probabilities(row, logits)
    order = by_falling(probabilities)
    target = uniform(row.seed, row.position)
    return int(order[np.searchsorted(np.cumsum(probabilities[order]), target, side="right")])


# Draws.


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 1.7},
        {"min_p": 0.1},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
        {"logit_bias": {7: 3.0, 9: -100.0}, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"allowed_token_ids": (1, 2, 3, 4, 90), "min_tokens": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [24, 302])
def test_draws_follow_the_reference_distribution(change, vocab_size, backend):
    num_draws = 3000
    change = dict(change)
    if "allowed_token_ids" in change:
        change["allowed_token_ids"] = tuple(
            token_id for token_id in change["allowed_token_ids"] if token_id < vocab_size
        )
    row = make_row(replace(RANDOM, **change), prompt=[1, 2, 7], output=[7, 7, 5])
    logits = make_logits(1, vocab_size, seed=5)
    rows = [replace(row, seed=index % 7, position=index) for index in range(num_draws)]

    counts = np.bincount(sample(logits.expand(num_draws, -1), rows).token_ids, minlength=vocab_size)

    expected = kept_probabilities(row, logits[0].numpy()) * num_draws
    assert counts[expected == 0].sum() == 0
    is_common = expected >= 5
    observed = np.append(counts[is_common], counts[~is_common].sum())
    wanted = np.append(expected[is_common], expected[~is_common].sum())
    freedom = len(observed) - 1
    statistic = ((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4


@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 1},
        {"top_k": 12},
        {"top_k": 40},
        {"top_k": 2000},
        {"top_p": 0.05},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_k": 30, "top_p": 0.5},
        {"top_k": 30, "top_p": 0.99, "min_p": 0.3},
        {"top_p": 0.95, "min_p": 0.05},
    ],
    ids=str,
)
def test_filtered_draws_match_the_sorted_inverse_cdf(change, scale, backend):
    logits = make_logits(40, 2500, seed=1, scale=scale)
    rows = [make_row(replace(RANDOM, **change), seed=3, position=position) for position in range(40)]

    token_ids = sample(logits, rows).token_ids

    pairs = zip(rows, logits.numpy(), strict=True)
    assert token_ids == [reference_sorted_choice(row, row_logits) for row, row_logits in pairs]


def test_flat_logits_draw_from_the_whole_nucleus(backend):
    rows = [make_row(replace(RANDOM, top_p=0.5), position=position) for position in range(300)]

    token_ids = sample(torch.zeros(1, 1000).expand(300, -1), rows).token_ids

    assert max(token_ids) < 500  # equal logits: the lower ids
    assert len(set(token_ids)) > 200


def test_draws_differ_by_position_and_by_seed():
    logits = torch.zeros(1, 5000).expand(100, -1)

    by_position = sample(logits, [make_row(RANDOM, position=index) for index in range(100)]).token_ids
    by_seed = sample(logits, [make_row(RANDOM, seed=index) for index in range(100)]).token_ids

    assert len(set(by_position)) > 90
    assert len(set(by_seed)) > 90
    assert by_position[1:] != by_seed[1:]


def test_tiny_and_huge_temperatures_give_finite_results(backend):
    logits = make_logits(2, 500, scale=1000.0)
    for change in ({}, {"top_p": 0.9}, {"top_k": 7}):
        cold = replace(RANDOM, temperature=2e-5, **change)
        hot = replace(RANDOM, temperature=1e6, **change)
        result = sample(logits, [make_row(cold), make_row(hot)])
        assert result.is_finite == [True, True]
        assert result.token_ids[0] == int(logits[0].argmax())


@pytest.mark.parametrize("change", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_the_extremes_of_the_noise_draw_tokens_with_nonzero_probability(change, monkeypatch):
    logits = make_logits(2, 700)
    logits[:, :100] = -torch.inf
    logits[:, 600:] = -torch.inf
    ends = [0.0, 1 - 2.0**-53]
    monkeypatch.setattr("loraserve_kernels.sampling.uniform", lambda seed, position: ends[position])

    rows = [make_row(replace(RANDOM, **change), position=position) for position in (0, 1)]
    for token_id in sample(logits, rows).token_ids:
        assert 100 <= token_id < 600


# Greedy and ties.


def test_greedy_takes_the_lowest_id_among_equal_logits(backend):
    logits = torch.zeros(1, 1000)
    logits[0, [900, 70, 333]] = 4

    assert sample_one(logits, GREEDY) == 70
    assert sample_one(logits, replace(GREEDY, logit_bias={5: 1.0})) == 70


def test_top_k_keeps_the_lowest_ids_among_equal_logits(backend):
    logits = torch.zeros(1, 1000)
    logits[0, [900, 70, 333, 80]] = 4
    rows = [make_row(replace(RANDOM, top_k=3), position=position) for position in range(200)]

    assert set(sample(logits.expand(200, -1), rows).token_ids) == {70, 80, 333}


def test_negative_zero_ties_with_zero(backend):
    logits = torch.full((1, 500), -5.0)
    logits[0, [9, 4]] = torch.tensor([0.0, -0.0])

    assert sample_one(logits, replace(RANDOM, top_k=1)) == 4


# Edits.


@pytest.mark.parametrize("keeps_state", [False, True])
def test_penalties_match_the_reference_token_by_token(keeps_state, backend):
    params = replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=-0.2)
    prompt = [5, 5, 6, 299]
    state = PenaltyState(prompt) if keeps_state else None
    output = []
    for step in range(150):  # grows the state beyond its first capacity
        row = make_row(params, prompt=prompt, output=output, state=state)
        logits = make_logits(1, 300, seed=step, scale=1.0)
        token_id = sample(logits, [row]).token_ids[0]
        assert token_id == int(edited_logits(row, logits[0].numpy()).argmax())
        output.append(token_id)


def test_penalty_state_counts_only_new_tokens():
    state = PenaltyState([4, 4, 9])
    output = [9, 1]
    state.catch_up(output)
    state.catch_up(output)
    output += [1]
    state.catch_up(output)

    counted = state.counted
    pairs = zip(counted.token_ids.tolist(), counted.counts.tolist(), strict=True)
    assert dict(list(pairs)[: counted.num_tokens]) == {4: 0, 9: 1, 1: 2}


def test_prompt_tokens_are_not_penalized_if_the_repetition_penalty_is_1(backend):
    logits = torch.tensor([[0.0, 2.0, 1.9, 0.0]])
    params = replace(GREEDY, presence_penalty=1.0)

    assert sample_one(logits, params, prompt=[1]) == 1
    assert sample_one(logits, params, output=[1]) == 2


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits(backend):
    params = replace(GREEDY, repetition_penalty=2.0)

    assert sample_one(torch.tensor([[3.0, 2.0, 1.0]]), params, prompt=[0]) == 1
    assert sample_one(torch.tensor([[0.5, 0.3, 0.1]]), params, prompt=[0]) == 1
    assert sample_one(torch.tensor([[-3.0, -4.0, -5.9]]), params, prompt=[0]) == 1


def test_presence_penalty_ignores_prompt_tokens_even_with_a_repetition_penalty(backend):
    params = replace(GREEDY, repetition_penalty=1.1, presence_penalty=1.0)

    assert sample_one(torch.tensor([[3.0, 2.0]]), params, prompt=[0]) == 0
    assert sample_one(torch.tensor([[3.0, 2.0]]), params, output=[0]) == 1


def test_bias_is_applied_before_the_repetition_penalty(backend):
    params = replace(GREEDY, repetition_penalty=2.0, logit_bias={0: 4.0})

    assert sample_one(torch.tensor([[-1.0, 1.7]]), params, prompt=[0]) == 1  # (-1 + 4) / 2, not -1 * 2 + 4


def test_eos_and_stop_tokens_are_banned_until_min_tokens(backend):
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0, 7.0, 2.0]])
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(4,))

    assert sample_one(logits, params, output=[1]) == 5
    assert sample_one(logits, params, output=[1, 1]) == 2
    assert sample_one(logits, replace(params, ignore_eos=True), output=[1]) == 5


def test_min_tokens_edits_nothing_unless_a_stop_token_has_the_largest_logit():
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0], [0.0, 1.0, 9.0, 8.0], [0.0, 1.0, 9.0, 8.0]])
    rows = [make_row(replace(GREEDY, min_tokens=2), output=[1]), make_row(GREEDY), make_row(GREEDY)]
    host = Recorder(ReferenceSampling())

    assert sample(logits, rows, host=host).token_ids == [1, 2, 2]
    assert host.calls == ["argmax"]
    rows[1] = make_row(replace(GREEDY, min_tokens=2), output=[1])
    assert sample(logits, rows, host=host).token_ids == [1, 1, 2]
    assert host.calls == ["argmax", "argmax", "draw_edited"]


def test_greedy_respects_allowed_tokens_and_bias(backend):
    logits = make_logits(1, 200)
    best = int(logits.argmax())

    assert sample_one(logits, replace(GREEDY, allowed_token_ids=(3, 150))) in (3, 150)
    assert sample_one(logits, replace(GREEDY, logit_bias={best: -100.0})) != best
    assert sample_one(logits, replace(GREEDY, logit_bias={11: 100.0})) == 11


def test_ids_outside_the_vocabulary_are_ignored(backend):
    logits = make_logits(1, 64)
    params = replace(
        GREEDY,
        logit_bias={-1: 50.0, 60: 50.0, 10**6: 50.0},
        allowed_token_ids=(5, 60, -3),
        repetition_penalty=1.2,
        min_tokens=3,
        stop_token_ids=(61,),
    )

    assert sample(logits, [make_row(params, prompt=[62, 5], output=[63], eos=(2, 70))], vocab_size=60).token_ids == [5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_bans_all_its_allowed_tokens_takes_the_best_of_them(temperature, backend):
    params = replace(RANDOM, temperature=temperature, min_tokens=5, allowed_token_ids=(3, 2), logprobs=1)
    logits = torch.tensor([[9.0, 9.0, 1.0, 2.0]])

    result = sample(logits, [make_row(params)])

    assert result.token_ids == [3]
    assert result.is_finite == [True]
    assert result.logprobs[0].logprob == pytest.approx(math.log(softmax(logits[0].double().numpy())[3]))


def test_a_row_that_bans_the_whole_vocabulary_takes_the_best_token(backend):
    params = replace(RANDOM, min_tokens=5, stop_token_ids=(0, 1))

    assert sample_one(torch.tensor([[1.0, 3.0, 0.0, 2.0]]), params) == 1


def test_a_row_that_allows_only_ids_outside_the_vocabulary_fails_alone(backend):
    params = replace(GREEDY, allowed_token_ids=(100,))
    logits = torch.tensor([[1.0, 3.0], [3.0, 1.0]])

    result = sample(logits, [make_row(params), make_row(GREEDY)])

    assert result.is_finite == [False, True]
    assert result.token_ids[1] == 0


def test_logits_are_not_modified(backend):
    logits = make_logits(2, 100)
    before = logits.clone()

    sample(
        logits, [make_row(replace(RANDOM, logit_bias={1: 5.0}, repetition_penalty=2.0), prompt=[4]), make_row(RANDOM)]
    )

    assert torch.equal(logits, before)


# Padding columns, NaN and infinity.


@pytest.mark.parametrize("padding", [torch.inf, torch.nan, 1e30])
@pytest.mark.parametrize("params", [GREEDY, RANDOM, replace(RANDOM, top_p=0.9), replace(RANDOM, top_k=90)], ids=str)
def test_padding_columns_are_never_read(padding, params, backend):
    clean = make_logits(50, 100)
    padded = torch.cat([clean, torch.full((50, 28), padding)], 1)
    rows = [make_row(replace(params, logprobs=3), position=position) for position in range(50)]

    result = sample(padded, rows, vocab_size=100)

    assert result == sample(clean, rows)
    assert all(result.is_finite)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_nan_or_infinity_fails_alone(bad, backend):
    everything = [GREEDY, RANDOM, replace(RANDOM, top_k=5), replace(RANDOM, top_p=0.9), replace(RANDOM, min_p=0.1)]
    everything += [replace(GREEDY, logit_bias={3: 1.0}), replace(RANDOM, allowed_token_ids=(4, 5))]
    everything = [replace(params, logprobs=2) for params in everything] * 2
    rows = [make_row(params, position=position) for position, params in enumerate(everything)]
    logits = make_logits(len(rows), 400)
    expected = sample(logits, rows)
    broken = logits.clone()
    broken[: len(rows) // 2, 77] = bad

    result = sample(broken, rows)

    half = len(rows) // 2
    assert result.is_finite == [False] * half + [True] * half
    assert result.token_ids[half:] == expected.token_ids[half:]
    assert result.logprobs[:half] == [None] * half
    assert result.logprobs[half:] == expected.logprobs[half:]


def test_a_row_of_only_minus_infinity_is_not_finite(backend):
    logits = torch.full((1, 30), -torch.inf)

    assert sample(logits, [make_row(RANDOM)]).is_finite == [False]


def test_tokens_at_minus_infinity_are_never_drawn(backend):
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [8, 250]] = 1.0
    for change in ({}, {"top_k": 200}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.2}):
        rows = [make_row(replace(RANDOM, **change), position=position) for position in range(50)]
        assert set(sample(logits.expand(50, -1), rows).token_ids) == {8, 250}


# Logprobs.


@pytest.mark.parametrize("num_top", [0, 1, 5, 400])
def test_logprobs_are_computed_from_the_raw_logits(num_top, backend):
    params = replace(GREEDY, logprobs=num_top, logit_bias={17: 100.0}, temperature=0.3, top_k=2)
    logits = make_logits(1, 400)

    result = sample(logits, [make_row(params)])

    logprob = result.logprobs[0]
    expected = np.log(softmax(logits[0].double().numpy()))
    assert result.token_ids == [17]
    assert logprob.token_id == 17
    assert logprob.logprob == pytest.approx(expected[17], abs=1e-5)
    assert logprob.rank == 1 + (expected > expected[17]).sum()
    assert [token_id for token_id, _ in logprob.top] == np.argsort(-expected, kind="stable")[:num_top].tolist()
    assert [value for _, value in logprob.top] == pytest.approx(np.sort(expected)[::-1][:num_top].tolist(), abs=1e-5)


def test_equal_logits_share_a_rank_and_list_the_lower_id_first(backend):
    logits = torch.zeros(1, 300)
    logits[0, [200, 100]] = 1.0

    (logprob,) = make_sampler(300, 300).prompt_logprobs(logits, [200], 3)

    assert logprob.rank == 1
    assert [token_id for token_id, _ in logprob.top] == [100, 200, 0]


def test_prompt_logprobs_equal_those_of_single_rows(backend):
    logits = make_logits(600, 130)
    targets = [(7 * index) % 128 for index in range(600)]
    logits[5, 3] = torch.nan
    engine_sampler = make_sampler(128, 130)

    found = engine_sampler.prompt_logprobs(logits, targets, 4)

    assert math.isnan(found[5].logprob)
    assert found[5].top == []
    for index in (0, 4, 6, 255, 256, 599):
        assert found[index] == engine_sampler.prompt_logprobs(logits[index : index + 1], [targets[index]], 4)[0]
    expected = np.log(softmax(logits[599, :128].double().numpy()))
    assert found[599].logprob == pytest.approx(expected[targets[599]], abs=1e-5)


def test_logprobs_of_known_tokens_take_one_call():
    host = host_in_c()
    logits = make_logits(3, 300)
    rows = [make_row(replace(GREEDY, logprobs=2)), make_row(replace(RANDOM, logprobs=0)), make_row(GREEDY)]
    expected = sample(logits, rows, host=host)
    best = host.argmax(logits, 300)
    drawn = host.draw(logits, 300, make_sampler(300, 300, host).draws_of(list(enumerate(rows))))
    recorder = Recorder(host)

    found = make_sampler(300, 300, recorder).sample(logits, rows, best, drawn)

    assert found == expected
    assert recorder.calls == ["score"]
    assert found.logprobs[2] is None


def test_an_empty_batch_gives_empty_results(backend):
    engine_sampler = make_sampler(10, 16)

    assert engine_sampler.sample(torch.empty(0, 16), []).token_ids == []
    assert engine_sampler.prompt_logprobs(torch.empty(0, 16), [], 5) == []


# The batch.

sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.just(64),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.9]),
    top_k=st.sampled_from([0, 0, 1, 4, 11, 50, 500]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, 996), st.floats(-100, 100, width=32), max_size=3),
    allowed_token_ids=st.sampled_from([(), (), (2, 3), tuple(range(0, 900, 7))]),
    min_tokens=st.sampled_from([0, 3]),
    logprobs=st.sampled_from([None, 0, 3, 700]),
)
token_lists = st.lists(st.integers(0, 996), max_size=8)
sampling_rows = st.builds(
    SamplingRow,
    params=sampling_params,
    seed=st.integers(0, 2**63),
    position=st.integers(0, 10**5),
    prompt_token_ids=token_lists,
    output_token_ids=token_lists,
    eos_token_ids=st.just(EOS),
    penalty_state=st.none(),
)


@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(sampling_rows, min_size=2, max_size=12),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.1, 2.0, 10.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bad=st.sets(st.integers(0, 11), max_size=3),
    in_c=st.booleans(),
)
def test_a_row_gives_bit_identical_results_alone_and_in_a_batch(rows, seed, scale, dtype, bad, in_c):
    host = host_in_c() if in_c else None
    logits = make_logits(len(rows), 1024, seed, scale).to(dtype)
    logits[[index for index in bad if index < len(rows)], 5] = torch.nan

    together = sample(logits, rows, vocab_size=997, host=host)

    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1].clone(), [row], vocab_size=997, host=host)
        assert alone.is_finite == [together.is_finite[index]]
        if alone.is_finite[0]:
            assert alone.token_ids == [together.token_ids[index]]
            assert alone.logprobs == [together.logprobs[index]]


def test_a_row_gives_the_same_results_alone_and_in_a_batch_with_a_real_vocabulary_size():
    params = [RANDOM, replace(RANDOM, top_p=0.9), replace(RANDOM, top_k=50), replace(RANDOM, min_p=0.01)]
    logits = make_logits(8, 50257, scale=1.0)
    rows = [make_row(replace(params[index % 4], logprobs=2), position=index) for index in range(8)]

    together = sample(logits, rows)

    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1].clone(), [row])
        assert (alone.token_ids[0], alone.logprobs[0]) == (together.token_ids[index], together.logprobs[index])

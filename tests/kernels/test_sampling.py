"""Sampling with tensors against the engine's CPU sampler, which is in C if that can be compiled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.logit_edits import RowEdits, fill_token_counts, pack_edits
from loraserve_kernels.sampling import DrawParams, check_sample, make_logits, pack_draws, sample_reference
from torch import Tensor

from loraserve.engine.request import SamplingParams
from loraserve.engine.sampling.row import SamplingRow
from loraserve.engine.sampling.sampler import Sampler

HAS_GPU = torch.cuda.is_available()
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
RANDOM = SamplingParams(max_tokens=64, temperature=0.8)
EOS = (2, 3)


@dataclass(slots=True)
class Implementation:
    """`sample_reference` or its Triton counterpart, and where its tensors are."""

    sample: Callable[..., tuple[Tensor, Tensor]]
    device: str


@pytest.fixture(params=["reference", pytest.param("triton", marks=[pytest.mark.gpu] if HAS_GPU else [])])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "reference":
        return Implementation(sample_reference, "cpu")
    device = request.getfixturevalue("triton_device")
    from loraserve_kernels.triton_ops.sampling import sample

    return Implementation(sample, device)


def make_row(params, seed=0, position=0, prompt=(), output=()) -> SamplingRow:
    return SamplingRow(params, seed, position, prompt, output, EOS)


def draws_of(rows: Sequence[SamplingRow], device: str) -> DrawParams | None:
    if all(row.is_greedy for row in rows):
        return None
    params = [row.params for row in rows]
    return pack_draws(
        [each.temperature for each in params],
        [each.top_k for each in params],
        [each.top_p for each in params],
        [each.min_p for each in params],
        [row.seed for row in rows],
        [row.position for row in rows],
        device,
    )


def edits_of(rows: Sequence[SamplingRow], vocab_size: int, device: str):
    if not any(row.has_edits for row in rows):
        return None
    counts = torch.zeros(len(rows), vocab_size, dtype=torch.int32, device=device)
    edits = []
    for index, row in enumerate(rows):
        params = row.params
        if row.has_penalties:
            fill_token_counts(counts[index], row.prompt_token_ids, row.output_token_ids)
        edits.append(
            RowEdits(
                allowed_token_ids=params.allowed_token_ids,
                bias=params.logit_bias,
                banned_token_ids=(*row.eos_token_ids, *params.stop_token_ids) if row.is_below_min_tokens else (),
                repetition=params.repetition_penalty,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
                count_row=index if row.has_penalties else -1,
            )
        )
    return pack_edits(edits, counts)


def tensors_of(rows: Sequence[SamplingRow], vocab_size: int, device: str):
    return draws_of(rows, device), edits_of(rows, vocab_size, device)


def overwrite(held, other) -> None:
    """Overwrites every tensor of a dataclass in place."""
    for each in fields(held):
        getattr(held, each.name).copy_(getattr(other, each.name))


def run(implementation: Implementation, logits: Tensor, rows: Sequence[SamplingRow], vocab_size: int | None = None):
    """Each row's token id; None for a row that is not finite."""
    vocab_size = vocab_size or logits.shape[1]
    logits = logits.to(implementation.device)
    draws, edits = tensors_of(rows, vocab_size, implementation.device)
    check_sample(logits, vocab_size, draws, edits)
    token_ids, is_finite = implementation.sample(logits, vocab_size, draws, edits)
    return [t if finite else None for t, finite in zip(token_ids.tolist(), is_finite.tolist(), strict=True)]


def expected(logits: Tensor, rows: Sequence[SamplingRow], vocab_size: int | None = None):
    host, _ = choose_backend("cpu")
    sampled = Sampler(vocab_size or logits.shape[1], logits.shape[1], host).sample(logits.float(), rows)
    return [t if finite else None for t, finite in zip(sampled.token_ids, sampled.is_finite, strict=True)]


def drawn_rows(change: dict, num_rows: int) -> list[SamplingRow]:
    return [make_row(replace(RANDOM, **change), seed=index % 3, position=40 + index) for index in range(num_rows)]


# Greedy.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 8192, 20_001])
def test_greedy_takes_the_lowest_id_of_the_largest_logit(implementation, vocab_size, dtype):
    logits = make_logits(5, vocab_size, 1).to(dtype)
    logits[1] = -0.0
    logits[1, vocab_size // 2 :] = 0.0
    logits[2] = -torch.inf
    logits[2, vocab_size - 1] = -3.0
    logits[3, vocab_size // 3] = logits[3, vocab_size - 1] = 50.0
    assert run(implementation, logits, [make_row(GREEDY)] * 5) == [
        int(logits[0].argmax()),
        0,
        vocab_size - 1,
        vocab_size // 3,
        int(logits[4].argmax()),
    ]


@pytest.mark.parametrize("params", [GREEDY, RANDOM, replace(RANDOM, top_k=3, logit_bias={1: 2.0})], ids=range(3))
def test_rows_that_are_not_finite_are_flagged_and_affect_no_other_row(implementation, params):
    logits = make_logits(6, 300, 10)
    logits[1, 7], logits[2, 299], logits[3], logits[4, 5] = torch.nan, torch.inf, -torch.inf, -torch.inf
    rows = [make_row(params, seed=index) for index in range(6)]
    found = run(implementation, logits, rows)
    assert found[1:4] == [None] * 3
    assert None not in (found[0], *found[4:])
    assert found == expected(logits, rows)


def test_padding_of_the_vocabulary_is_never_read(implementation):
    logits = torch.cat([make_logits(4, 130, 5), torch.full((4, 6), torch.nan)], dim=1)
    rows = [make_row(GREEDY), *drawn_rows({"top_p": 0.9}, 2), make_row(replace(RANDOM, logit_bias={131: 9.0}))]
    assert run(implementation, logits, rows, 130) == expected(logits, rows, 130)


def test_a_batch_without_rows_returns_no_tokens(implementation):
    assert run(implementation, torch.zeros(0, 10), []) == []


# Draws.


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 1.7},
        {"temperature": 2e-5},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 1},
        {"top_k": 12},
        {"top_p": 0.7},
        {"top_p": 0.999},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize(("vocab_size", "num_likely"), [(24, 24), (302, 12), (3000, 40)])
def test_draws_the_same_tokens_as_the_engines_sampler(implementation, vocab_size, num_likely, change):
    logits = make_logits(4, vocab_size, num_likely, seed=5)
    rows = drawn_rows(change, 4)
    assert run(implementation, logits, rows) == expected(logits, rows)


@pytest.mark.parametrize(
    "change",
    [{"top_k": 250}, {"top_k": 250, "top_p": 0.5}, {"top_k": 290, "min_p": 0.3}, {"top_k": 4000}, {"top_p": 1e-9}],
    ids=str,
)
def test_draws_with_a_top_k_too_large_to_gather(implementation, change):
    logits = make_logits(3, 300, 300, seed=2)
    rows = drawn_rows(change, 3)
    assert run(implementation, logits, rows) == expected(logits, rows)


def test_draws_from_a_nucleus_larger_than_the_gathered_tokens(implementation):
    logits = make_logits(3, 3000, 3000, seed=2)
    rows = drawn_rows({"top_p": 0.95, "temperature": 2.0}, 3)
    assert run(implementation, logits, rows) == expected(logits, rows)


WIDE = [{"top_k": 250}, {"top_k": 250, "top_p": 0.5}, {"top_p": 0.95, "temperature": 2.0}, {"top_k": 9}, {}]


@pytest.mark.parametrize("change", WIDE, ids=str)
def test_half_a_sort_key_is_enough_for_bfloat16_logits(triton_device, monkeypatch, change):
    """A GPU searches bfloat16 this way; the interpreter gets the same numbers in float32."""
    from loraserve_kernels.triton_ops import sampling

    monkeypatch.setitem(sampling.KEY_SHIFTS, torch.float32, 16)
    logits = make_logits(3, 1200, 1200, seed=2).bfloat16().float() - 14
    rows = drawn_rows(change, 3)
    assert run(Implementation(sampling.sample, triton_device), logits, rows) == expected(logits, rows)


@pytest.mark.parametrize("change", [*WIDE, {"top_p": 0.8}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_draws_from_bfloat16(triton_device, dtype, change):
    from loraserve_kernels.triton_ops.sampling import sample

    logits = make_logits(8, 3000, 300, seed=2, dtype=dtype)
    rows = drawn_rows(change, 8)
    assert run(Implementation(sample, triton_device), logits, rows) == expected(logits, rows)


@pytest.mark.parametrize(
    "change", [{"top_k": 7}, {"top_k": 60}, {"top_p": 0.4}, {"top_k": 60, "top_p": 0.6}, {"min_p": 0.5}], ids=str
)
@pytest.mark.parametrize("num_values", [1, 4])
def test_equal_logits_are_ordered_by_ascending_id(implementation, change, num_values):
    """With 4 values and top_k 60, the last kept tokens are some of many equal ones, which the search picks by id."""
    logits = torch.randint(num_values, (3, 200), generator=torch.Generator().manual_seed(1)).float()
    logits[1] *= -1
    logits[1, ::2] += 0.0  # 0 among -0
    rows = drawn_rows(change, 3)
    assert run(implementation, logits, rows) == expected(logits, rows)


@pytest.mark.parametrize("change", [{}, {"top_k": 9}], ids=str)
def test_any_integer_is_a_seed(implementation, change):
    seeds = [0, -1, 2**63, 2**64 + 5, -(2**80) + 1]
    rows = [make_row(replace(RANDOM, **change), seed=seed, position=2**33 + seed % 7) for seed in seeds]
    logits = make_logits(1, 400, 200).expand(len(seeds), -1)
    assert run(implementation, logits, rows) == expected(logits, rows)


def test_another_position_draws_other_tokens(implementation):
    logits = make_logits(1, 300, 300).expand(6, -1)
    rows = drawn_rows({}, 6)
    moved = [replace(row, position=row.position + 1) for row in rows]
    assert run(implementation, logits, rows) != run(implementation, logits, moved)


def test_a_row_gets_the_same_token_alone_and_in_a_batch(implementation):
    logits = make_logits(6, 500, 30, seed=9)
    rows = [
        make_row(GREEDY),
        make_row(RANDOM, seed=1),
        make_row(replace(RANDOM, top_p=0.9), seed=2),
        make_row(replace(RANDOM, top_k=5, repetition_penalty=1.3), seed=3, prompt=(1, 2), output=(4, 4)),
        make_row(replace(RANDOM, allowed_token_ids=(4, 9, 77)), seed=4),
        make_row(replace(RANDOM, top_k=450), seed=5),
    ]
    alone = [run(implementation, logits[[index]], [row])[0] for index, row in enumerate(rows)]
    assert run(implementation, logits, rows) == alone
    assert alone == expected(logits, rows)


# Edits.

EDITS = [
    {"logit_bias": {7: 30.0, 9: -100.0, 400: 5.0, -3: 2.0}},
    {"allowed_token_ids": (90, 3, 5, 3, 1000)},
    {"allowed_token_ids": (90, 3, 5), "logit_bias": {3: 4.0, 7: 50.0}, "min_tokens": 9},
    {"min_tokens": 9, "stop_token_ids": (11, 2)},
    {"min_tokens": 3, "stop_token_ids": (11,)},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.3, "frequency_penalty": -0.7},
    {"repetition_penalty": 0.6, "presence_penalty": -0.4, "frequency_penalty": 0.9, "logit_bias": {5: 8.0, 7: -2.0}},
]


@pytest.mark.parametrize("choice", [GREEDY, RANDOM, replace(RANDOM, top_k=8)], ids=["greedy", "all", "top_k"])
@pytest.mark.parametrize("change", EDITS, ids=str)
def test_edits_match_those_of_the_engines_sampler(implementation, choice, change):
    logits = make_logits(4, 200, 6, seed=3)
    logits[:, 5], logits[:, 7], logits[:, 11] = 15.0, 15.5, -2.0
    prompt, output = (5, 11, 60, 900), (7, 7, 5, 7)
    rows = [make_row(replace(choice, **change), index, 9, prompt, output) for index in range(3)]
    rows.append(make_row(choice, 3, 9))
    assert run(implementation, logits, rows) == expected(logits, rows)


@pytest.mark.skipif(HAS_GPU, reason="no function of a compiled kernel can be replaced")
@pytest.mark.parametrize("change", [{"top_k": 20}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}], ids=str)
def test_a_few_allowed_tokens_are_gathered_instead_of_searched_for(triton_device, monkeypatch, change):
    from loraserve_kernels.triton_ops import sampling, token_choice

    monkeypatch.setattr(token_choice, "choose_by_search", lambda *_: pytest.fail("searched the row"))
    logits = make_logits(6, 3000, 3000, seed=2)
    rows = drawn_rows({**change, "allowed_token_ids": (4, 9, 77, 2999)}, 6)
    found = run(Implementation(sampling.sample, triton_device), logits, rows)
    assert found == expected(logits, rows)
    assert len(set(found)) > 1


def test_each_edit_changes_the_greedy_token(implementation):
    """Ensures that the comparison above fails if edits are ignored."""
    logits = make_logits(1, 200, 1, seed=3)
    logits[:, 2], logits[:, 3], logits[:, 5], logits[:, 7], logits[:, 9] = 21.0, 20.9, 20.8, 20.7, 20.6
    moved = [
        ({"logit_bias": {9: 1.0}}, 9),
        ({"allowed_token_ids": (9, 5)}, 5),
        ({"min_tokens": 9}, 5),
        ({"repetition_penalty": 1.1}, 3),
        ({"presence_penalty": 0.15}, 3),
        ({"frequency_penalty": 0.06}, 3),
    ]
    found = [
        run(implementation, logits, [make_row(replace(GREEDY, **change), 0, 4, (), (2, 2))])[0] for change, _ in moved
    ]
    assert found == [token_id for _, token_id in moved]


def test_a_row_whose_edits_exclude_every_token_gets_its_best_allowed_token(implementation):
    logits = make_logits(4, 200, 3, seed=3)
    banned = replace(GREEDY, min_tokens=5, stop_token_ids=(9, 60))
    rows = [
        make_row(replace(banned, allowed_token_ids=(60, 2, 9))),
        make_row(replace(banned, temperature=0.9, allowed_token_ids=(60, 9)), seed=1),
        make_row(replace(GREEDY, allowed_token_ids=(500, -1))),
        make_row(replace(GREEDY, logit_bias=dict.fromkeys(range(200), -float("inf")))),
    ]
    found = run(implementation, logits, rows)
    assert found == expected(logits, rows)
    assert found[2] is None
    assert found[3] == int(logits[3].argmax())


def test_a_row_that_edits_make_infinite_is_flagged(implementation):
    rows = [make_row(replace(choice, logit_bias={4: float("inf")})) for choice in (GREEDY, RANDOM)]
    assert run(implementation, make_logits(2, 100, 3), rows) == [None, None]


# Behavior that a captured graph relies on.


def test_a_replay_uses_new_values_in_the_same_tensors(triton_device, replayed):
    from loraserve_kernels.triton_ops.sampling import sample

    logits = make_logits(4, 300, 8, seed=1)
    biased = replace(GREEDY, logit_bias={4: 40.0, 5: 20.0})
    first = [make_row(biased), make_row(GREEDY), make_row(GREEDY), make_row(RANDOM, seed=8)]
    second = [
        *drawn_rows({"top_p": 0.8}, 2),
        make_row(replace(RANDOM, top_k=6, logit_bias={9: 20.0}, repetition_penalty=1.2), seed=3, output=(9, 9)),
        make_row(replace(GREEDY, allowed_token_ids=(8,))),
    ]
    held, draws, edits = logits.to(triton_device), *tensors_of(first, 300, triton_device)
    results = []
    replay = replayed(lambda: results.append(sample(held, 300, draws, edits)))
    replay()
    assert results[-1][0].tolist() == expected(logits, first)
    moved = logits.flip(0)
    held.copy_(moved)
    other_draws, other_edits = tensors_of(second, 300, triton_device)
    overwrite(draws, other_draws)
    overwrite(edits, other_edits)
    replay()
    assert results[-1][0].tolist() == expected(moved, second)


def test_token_counts_on_the_device_follow_the_outputs(triton_device):
    from loraserve_kernels.triton_ops.logit_edits import count_tokens
    from loraserve_kernels.triton_ops.sampling import sample

    vocab_size, prompt = 50, (3, 9)
    params = replace(RANDOM, temperature=0.3, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.8)
    counts = torch.zeros(3, vocab_size, dtype=torch.int32, device=triton_device)
    fill_token_counts(counts[2], prompt, ())
    edits = pack_edits([RowEdits(), RowEdits(repetition=1.2, presence=0.5, frequency=0.8, count_row=2)], counts)
    outputs: list[int] = []
    for step in range(6):
        logits = make_logits(2, vocab_size, 3, seed=1)
        rows = [make_row(RANDOM, 4, step), make_row(params, 5, step, prompt, outputs)]
        draws = draws_of(rows, triton_device)
        token_ids, is_finite = sample(logits.to(triton_device), vocab_size, draws, edits)
        assert token_ids.tolist() == expected(logits, rows)
        count_tokens(edits, token_ids, is_finite)
        outputs.append(int(token_ids[1]))
    assert len(set(outputs)) > 1
    assert counts[:2].sum() == 0


def test_a_row_that_is_not_finite_is_not_counted(triton_device):
    from loraserve_kernels.triton_ops.logit_edits import count_tokens

    counts = torch.zeros(2, 8, dtype=torch.int32, device=triton_device)
    edits = pack_edits([RowEdits(count_row=1), RowEdits(count_row=0)], counts)
    count_tokens(edits, torch.tensor([5, 5], device=triton_device), torch.tensor([False, True], device=triton_device))
    assert counts.tolist() == [[0, 0, 0, 0, 0, 1, 0, 0], [0] * 8]


# Refusals.


@pytest.mark.parametrize(
    ("logits", "vocab_size", "change", "message"),
    [
        (torch.zeros(2, 8), 9, {}, "logits is"),
        (torch.zeros(2, 8, dtype=torch.float64), 8, {}, "logits.dtype"),
        (torch.zeros(3, 8), 8, {}, "temperature is"),
        (torch.zeros(2, 8), 8, {"top_k": torch.zeros(2, dtype=torch.int64)}, "top_k.dtype"),
    ],
)
def test_refuses_wrong_shapes_and_dtypes(logits, vocab_size, change, message):
    draws = replace(pack_draws([1.0] * 2, [0] * 2, [1.0] * 2, [0.0] * 2, [0, 1], [0, 0]), **change)
    with pytest.raises(ValueError, match=message):
        check_sample(logits, vocab_size, draws, None)


def test_refuses_counts_of_another_vocabulary():
    edits = pack_edits([RowEdits(), RowEdits()], torch.zeros(1, 9, dtype=torch.int32))
    with pytest.raises(ValueError, match="token_counts is"):
        check_sample(torch.zeros(2, 8), 8, None, edits)

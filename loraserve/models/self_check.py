"""Proof at load time that a model gives the same logits through our paged, packed, chunked batches as by itself.

Transformers' own flags are not enough: some models accept a registered attention function but keep state or masks
elsewhere, and would be silently wrong. So two sequences run in packed chunks, next to each other, and each is compared
with one plain eager forward. One has the first valid positions, the other the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from loraserve_kernels.step_batch import Segments, StateSlots, StepBatch
from torch import Tensor
from transformers import PreTrainedModel

from loraserve.models.attention import ATTENTION_NAME
from loraserve.models.context import ForwardContext
from loraserve.models.errors import DEVICE_ERRORS, ModelRefusedError
from loraserve.models.forward import Forward, TransformersForward
from loraserve.models.rounding import extra_rounding, tolerance_of
from loraserve.models.structure import AttentionSpec

BLOCK_SIZE = 16
MAX_PROBE_TOKENS = 96
NUM_PROBES_OF_EXPERTS = 4
"""Rounding may route a token to other experts, which changes its logits a lot: with a single probe, 6 of 60 random but
correct models in bfloat16 would have been refused. A real error shows in every probe."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Two sequences and their last-row logits as the unmodified model computes them."""

    token_ids: tuple[list[int], list[int]]
    positions: tuple[range, range]
    logits: Tensor
    """[2, vocab]."""
    tolerance: float
    """The largest difference from `logits` that counts as rounding, as a fraction of the largest |logit|."""


def make_probes(
    model: PreTrainedModel, attention: Sequence[AttentionSpec], max_model_len: int, num_probes: int = 1
) -> list[Probe]:
    """Probes from the unmodified model, with sequences long enough to exceed a small sliding window.

    Raises `ModelRefusedError` if the model fails on them, for example because it does not have the last positions.
    """
    windows = [spec.sliding_window for spec in attention if spec.sliding_window is not None]
    longest = max([24, *(window + 9 for window in windows if window + 9 <= MAX_PROBE_TOKENS)])
    longest = min(longest, max_model_len)
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    lengths = longest, max(2, longest - 7)
    tokens = [
        [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
        for _ in range(num_probes)
    ]
    first, last = range(lengths[0]), range(max_model_len - lengths[1], max_model_len)
    model.set_attn_implementation("eager")

    def own_logits() -> Tensor:
        firsts, seconds = ([of_probe[i] for of_probe in tokens] for i in range(2))
        return torch.stack([_own_logits(model, firsts, None), _own_logits(model, seconds, last)], dim=1)

    try:
        logits = own_logits()
        with extra_rounding(model):
            moved = own_logits()
    except (ModelRefusedError, *DEVICE_ERRORS):
        raise
    except Exception as error:
        raise ModelRefusedError(
            f"{type(model).__name__} cannot be served: its forward pass fails at positions up to {last[-1]} ({error})"
        ) from error
    return [
        Probe((ids[0], ids[1]), (first, last), own, tolerance_of(own, own_moved, model.dtype))
        for ids, own, own_moved in zip(tokens, logits, moved, strict=True)
    ]


@torch.inference_mode()
def _own_logits(model: PreTrainedModel, token_ids: list[list[int]], positions: range | None) -> Tensor:
    """Logits of each sequence's last row; all have one length. positions: None = the model counts them itself."""
    ids = torch.tensor(token_ids, device=model.device)
    position_ids = None if positions is None else torch.tensor([[*positions]], device=model.device).expand_as(ids)
    output = model(input_ids=ids, position_ids=position_ids, use_cache=False, logits_to_keep=1)
    return output.logits[:, -1].float()


def check(model: PreTrainedModel, attention: Sequence[AttentionSpec], context: ForwardContext, probe: Probe) -> float:
    """Run the probe in packed chunks through paged attention; returns the largest difference over the largest |logit|.

    Every attention module must have its `AttentionLayer` attached. The context's caches are replaced during the check.
    """
    model.set_attn_implementation(ATTENTION_NAME)
    logits = _run_probe(TransformersForward(model), model, attention, context, probe)[-1].float()
    return float((logits - probe.logits).abs().max() / probe.logits.abs().max())


def is_same(
    forward: Forward,
    model: PreTrainedModel,
    attention: Sequence[AttentionSpec],
    context: ForwardContext,
    probe: Probe,
) -> bool:
    """Whether a forward equals transformers' own over the same modules, bit for bit, in every step of the probe."""
    try:
        found = _run_probe(forward, model, attention, context, probe)
    except DEVICE_ERRORS:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError):
        return False
    expected = _run_probe(TransformersForward(model), model, attention, context, probe)
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _run_probe(
    forward: Forward,
    model: PreTrainedModel,
    attention: Sequence[AttentionSpec],
    context: ForwardContext,
    probe: Probe,
) -> list[Tensor]:
    """Each step's logits of both sequences' last rows."""
    context.k_caches, context.v_caches = _probe_caches(attention, model)
    context.states = _probe_states(context, model)
    lengths = [len(tokens) for tokens in probe.token_ids]
    half = lengths[1] // 2
    steps = [  # (start, end) of each sequence: its first chunk, its second chunk, then one decode row
        ((0, 3), (0, half)),
        ((3, lengths[0] - 1), (half, lengths[1] - 1)),
        ((lengths[0] - 1, lengths[0]), (lengths[1] - 1, lengths[1])),
    ]
    logits = []
    for ranges in steps:
        context.batch = _probe_batch(probe, ranges, model.device)
        logits.append(forward(context.batch).logits.clone())
    context.batch = None
    context.k_caches, context.v_caches, context.states = [], [], []
    return logits


def require_equal(
    model: PreTrainedModel, attention: Sequence[AttentionSpec], context: ForwardContext, probes: Sequence[Probe]
) -> None:
    """Raises `ModelRefusedError` if the paged model differs from the unmodified model in all probes."""
    name = type(model).__name__
    try:
        found = _first_equal(model, attention, context, probes)
    except DEVICE_ERRORS:
        raise
    except Exception as error:
        raise ModelRefusedError(
            f"{name} cannot be served: its forward pass fails on packed batches ({error})"
        ) from error
    difference, tolerance = found
    if not difference <= tolerance:
        raise ModelRefusedError(
            f"{name} cannot be served: in packed, chunked batches its logits differ from its own by {difference:.2g} "
            f"of the largest logit (at most {tolerance:.2g} is rounding). Models that keep masks or state "
            "outside transformers' attention interface are not supported."
        )


def is_equal(
    model: PreTrainedModel, attention: Sequence[AttentionSpec], context: ForwardContext, probes: Sequence[Probe]
) -> bool:
    """Whether the paged model, as it is now, gives the unmodified model's logits in at least one probe."""
    try:
        difference, tolerance = _first_equal(model, attention, context, probes)
        return difference <= tolerance
    except DEVICE_ERRORS:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError):
        return False


def _first_equal(
    model: PreTrainedModel, attention: Sequence[AttentionSpec], context: ForwardContext, probes: Sequence[Probe]
) -> tuple[float, float]:
    """(difference, tolerance) of the first probe that is within its tolerance, or else of the last."""
    found = 0.0, 0.0
    for probe in probes:
        found = check(model, attention, context, probe), probe.tolerance
        if found[0] <= found[1]:
            break
    return found


def _probe_caches(attention: Sequence[AttentionSpec], model: PreTrainedModel) -> tuple[list[Tensor], list[Tensor]]:
    num_blocks = 2 * (MAX_PROBE_TOKENS // BLOCK_SIZE + 1)

    def cache(spec: AttentionSpec) -> Tensor:
        shape = (num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
        return torch.full(shape, float("nan"), dtype=model.dtype, device=model.device)

    k_caches = [cache(spec) for spec in attention]
    return k_caches, [
        k_cache if spec.latent else cache(spec) for spec, k_cache in zip(attention, k_caches, strict=True)
    ]


def _probe_states(context: ForwardContext, model: PreTrainedModel) -> list[Tensor]:
    return [
        torch.full((2, *spec.shape), float("nan"), dtype=spec.dtype, device=model.device)
        for spec in context.state_specs
    ]


def _probe_batch(probe: Probe, ranges: Sequence[tuple[int, int]], device: torch.device) -> StepBatch:
    """Sequence i owns every second block, starting at block i, so that a wrong block shows."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    row_start: list[int] = []
    for i, (start, end) in enumerate(ranges):
        row_start.append(len(token_ids))
        token_ids += probe.token_ids[i][start:end]
        positions += probe.positions[i][start:end]
        slots += [(2 * (row // BLOCK_SIZE) + i) * BLOCK_SIZE + row % BLOCK_SIZE for row in range(start, end)]

    def int32(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    max_blocks = MAX_PROBE_TOKENS // BLOCK_SIZE + 1
    num_rows = [end - start for start, end in ranges]
    slots_read = [i if start > 0 else -1 for i, (start, _) in enumerate(ranges)]
    last_rows = [start + rows - 1 for start, rows in zip(row_start, num_rows, strict=True)]
    return StepBatch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        block_table=torch.stack([int32([2 * b + i for b in range(max_blocks)]) for i in range(2)]),
        context_lens=int32([end for _, end in ranges]),
        row_start=int32(row_start),
        num_rows=int32(num_rows),
        segments=Segments(int32([0, len(token_ids)]), int32([-1]), has_adapter=False),
        sampled_rows=torch.tensor(last_rows, device=device),
        sampled_segments=Segments(int32([0, 2]), int32([-1]), has_adapter=False),
        state_slots=StateSlots(int32(slots_read), int32([0, 1]), int32([-1, -1]), int32([0, 0])),
    )

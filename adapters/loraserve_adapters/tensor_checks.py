"""Checks that tensors have the shapes and dtypes that follow from the config and the base model."""

from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.checks import Checks
from loraserve_adapters.config import AdapterConfig
from loraserve_adapters.config_values import CONFIG_NAME
from loraserve_adapters.dtypes import FROM_SAFETENSORS
from loraserve_adapters.errors import AdapterError, shown, shown_name
from loraserve_adapters.limits import AdapterLimits
from loraserve_adapters.own_tables import OwnTableTensor
from loraserve_adapters.safetensors_file import WEIGHTS_NAME, TensorEntry
from loraserve_adapters.source_module import BaseCopy, SourcePart
from loraserve_adapters.targets import Target
from loraserve_adapters.trained_tokens import TrainedRows

_MAX_LABELS_SHOWN = 5
_OTHER_VOCABULARY = (
    "Use an adapter that was trained on exactly the served base weights. If training added tokens, serve the base "
    "model with the extended tables, or train the rows of these tokens with trainable_token_indices."
)
"""Remedy for a copy of the base's embedding or `lm_head` that has more or fewer rows."""


def check_part(part: SourcePart, target: Target, checks: Checks) -> None:
    rank = part.lora_rank
    num_ranks = rank if part.expert is not None else rank * (target.module.num_matrices or 1)
    expected: list[tuple[TensorEntry | None, tuple[int, ...], int]] = [
        (part.lora_a, (num_ranks, target.module.in_features), 0),
        (part.lora_b, (part.out_features, num_ranks), 1),
        (part.bias, (part.out_features,), -1),
        (part.magnitude, (part.out_features,), -1),
    ]
    for entry, shape, rank_axis in expected:
        if entry is not None:
            checks.attempt("weights.shapes", lambda e=entry, s=shape, axis=rank_axis: _check_shape(e, s, axis, rank))
            checks.attempt("weights.dtypes", lambda e=entry: check_dtype(e))


def check_rows(rows: TrainedRows, checks: Checks) -> None:
    entry, shape = rows.entry, (len(rows.tokens.token_ids), rows.tokens.module.weight_shape[1])
    for tensor in (entry, *([] if rows.copy is None else [rows.copy])):
        checks.attempt("weights.shapes", lambda tensor=tensor: _check_shape(tensor, shape, -1, 0))
        checks.attempt("weights.dtypes", lambda tensor=tensor: check_dtype(tensor))


def check_table(own: OwnTableTensor, checks: Checks) -> None:
    expected = own.table.module.weight_shape
    for tensor in (own.entry, *own.copies):
        if tensor.shape != expected:
            found, shown_shape = shown(list(tensor.shape)), str(list(expected))
            reason = f"found {found}, expected {shown_shape}: the shape in the served base model"
            remedy = _OTHER_VOCABULARY if tensor.shape[1:] == expected[1:] else None
            error = refused("shape_mismatch", tensor.name, reason, found=found, expected=shown_shape, remedy=remedy)
            checks.fail("weights.shapes", error)
        checks.attempt("weights.dtypes", lambda tensor=tensor: check_dtype(tensor))


def check_dtype(entry: TensorEntry) -> None:
    if entry.dtype not in FROM_SAFETENSORS:
        expected = "F32, F16 or BF16"
        reason = f"found {entry.dtype}, expected {expected}"
        raise refused("bad_dtype", entry.name, reason, found=entry.dtype, expected=expected)


def _check_shape(entry: TensorEntry, expected: tuple[int, ...], rank_axis: int, lora_rank: int) -> None:
    """rank_axis: the axis of the expected shape that counts ranks; -1 = none."""
    if entry.shape == expected:
        return
    code = "shape_mismatch"
    if rank_axis >= 0 and len(entry.shape) == 2 and entry.shape[1 - rank_axis] == expected[1 - rank_axis]:
        code = "rank_mismatch"
    found = shown(list(entry.shape))
    reason = f"found {found}, expected {list(expected)}"
    if entry.num_elements == 0:
        reason += ": empty, as DeepSpeed ZeRO-3 saves parameters that were not gathered"
        remedy = (
            "Save it again with stage3_gather_16bit_weights_on_model_save set to true, or restore the values from "
            "training's checkpoint with DeepSpeed's zero_to_fp32.py."
        )
        raise refused(code, entry.name, reason, found=found, expected=str(list(expected)), remedy=remedy)
    if code == "rank_mismatch":
        reason += f": this module has rank {lora_rank} in adapter_config.json"
        if expected[rank_axis] != lora_rank:
            reason += f", and there are {expected[rank_axis] // lora_rank} experts"
    raise refused(code, entry.name, reason, found=found, expected=str(list(expected)))


def count_labels(head: TensorEntry, config: AdapterConfig, layout: BaseLayout, limits: AdapterLimits) -> int:
    """The head's labels. Raises `AdapterError` if the head does not fit the base model, the limits or the config."""
    num_labels, hidden_size = head.shape if len(head.shape) == 2 else (0, 0)
    if num_labels == 0 or hidden_size != (layout.hidden_size or hidden_size):
        found, expected = shown(list(head.shape)), f"[number of labels, {layout.hidden_size or 'hidden size'}]"
        raise refused(
            "shape_mismatch", head.name, f"found {found}, expected {expected}", found=found, expected=expected
        )
    if num_labels > limits.max_labels:
        found, expected = f"{num_labels} labels", f"at most {limits.max_labels}"
        raise refused("too_large", head.name, f"{found}; {expected} are accepted", found=found, expected=expected)
    if config.labels and len(config.labels) != num_labels:
        found, expected = f"{len(config.labels)} names", f"{num_labels}, one for each output of {head.name}"
        reason = f"{CONFIG_NAME}: id2label: found {found}, expected {expected}"
        raise AdapterError("invalid_field", reason, file=CONFIG_NAME, key="id2label", found=found, expected=expected)
    if config.score_template and num_labels > 1:
        found, expected = f"{num_labels} labels", "one, whose score ranks the documents"
        reason = f"{CONFIG_NAME}: score_template: found {found}, expected {expected}"
        raise AdapterError(
            "invalid_field", reason, file=CONFIG_NAME, key="score_template", found=found, expected=expected
        )
    return num_labels


def shown_labels(config: AdapterConfig, num_labels: int) -> str:
    names = [shown_name(name) for name in config.labels[:_MAX_LABELS_SHOWN]]
    listed = f": {', '.join(names)}{', …' * (num_labels > len(names))}" if names else ""
    meaning = "" if config.problem_type is None else f" ({config.problem_type})"
    return f"a classifier of {num_labels} {'label' if num_labels == 1 else 'labels'}{meaning}{listed}"


def check_base_copy(copy: BaseCopy, checks: Checks) -> None:
    if copy.entry.shape != copy.shape:
        found = shown(list(copy.entry.shape))
        reason = f"found {found}, expected {list(copy.shape)}: the shape in the served base model"
        expected = str(list(copy.shape))
        remedy = _OTHER_VOCABULARY if copy.entry.shape[1:] == copy.shape[1:] != () else None
        error = refused("base_weight_differs", copy.entry.name, reason, found=found, expected=expected, remedy=remedy)
        checks.fail("weights.shapes", error)
    checks.attempt("weights.dtypes", lambda: check_dtype(copy.entry))


def refused(
    code: str,
    tensor: str,
    reason: str,
    *,
    found: str | None = None,
    expected: str | None = None,
    remedy: str | None = None,
) -> AdapterError:
    message = f"{WEIGHTS_NAME}: {shown_name(tensor)}: {reason}"
    return AdapterError(code, message, file=WEIGHTS_NAME, key=tensor, found=found, expected=expected, remedy=remedy)

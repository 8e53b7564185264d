"""The one pass over an adapter's values: they are hashed, checked and optionally written in the packed form."""

import hashlib
from typing import Protocol

import numpy as np

from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.checks import Checks
from loraserve_adapters.digest import HashedTensor
from loraserve_adapters.dtypes import FROM_SAFETENSORS, all_finite, convert, raw_bytes
from loraserve_adapters.errors import AdapterError, shown_name
from loraserve_adapters.judge import JudgedAdapter
from loraserve_adapters.safetensors_file import WEIGHTS_NAME, SafetensorsFile, TensorEntry
from loraserve_adapters.source_module import BaseCopy


class ValueSink(Protocol):
    """Takes the values of all LoRA tensors, of a classifier's head, and of own tables and rows, block by block."""

    def write(self, entry: TensorEntry, first_row: int, block: np.ndarray) -> None:
        """block: rows of the entry from `first_row`, finite, in the layout's dtype (magnitudes and heads: float32). A
        1-D entry is one row."""
        ...


def read_content(
    adapter: JudgedAdapter,
    weights: SafetensorsFile,
    layout: BaseLayout,
    checks: Checks,
    *,
    sink: ValueSink | None = None,
) -> list[HashedTensor]:
    """Takes about 20 MB, however large the adapter. Records values that are not finite, here or in the base's dtype."""
    hashed: list[HashedTensor] = []
    has_effect = adapter.head is not None or len(adapter.of_tables) > 0
    if adapter.head is not None:
        hashed.append(_read_tensor(weights, adapter.head, "float32", checks, sink)[0])
    for entry in adapter.of_tables:
        hashed.append(_read_tensor(weights, entry, layout.dtype, checks, sink)[0])
    for part in (part for module in adapter.modules for part in module.parts):
        is_zero: dict[str, bool] = {}
        for entry in part.entries:
            # bfloat16 would keep only seven fraction bits of a factor near 1.
            dtype = "float32" if entry is part.magnitude else layout.dtype
            tensor, is_zero[entry.name] = _read_tensor(weights, entry, dtype, checks, sink)
            hashed.append(tensor)
        is_biased = part.bias is not None and not is_zero[part.bias.name]
        has_product = not (is_zero[part.lora_a.name] or is_zero[part.lora_b.name])
        has_effect = has_effect or is_biased or part.magnitude is not None or has_product
    for copy, original in adapter.table_copies:
        hashed.append(_read_tensor(weights, copy, layout.dtype, checks, None)[0])
        if hashed[-1].sha256 != next(tensor.sha256 for tensor in hashed if tensor.entry == original):
            checks.fail("weights.values", _other_copy(copy, original))
    for copy in adapter.base_copies:
        hashed.append(_read_base_copy(weights, copy, layout.dtype, checks))
    if not checks.failed("weights.values"):
        checks.passed("weights.values", f"all values are finite, also in the base model's {layout.dtype}")
    if adapter.base_copies and not checks.failed("weights.base_copy"):
        checks.passed("weights.base_copy", "the base weights saved beside the adapter equal the served ones")
    if not has_effect and not checks.has_failed:
        reason = f"{WEIGHTS_NAME}: every lora_A or its lora_B is zero: the adapter answers exactly like the base model"
        checks.warn("weights.effect", AdapterError("no_effect", reason, file=WEIGHTS_NAME))
    return hashed


def _read_tensor(
    weights: SafetensorsFile, entry: TensorEntry, dtype: str, checks: Checks, sink: ValueSink | None
) -> tuple[HashedTensor, bool]:
    """The tensor's hash, and whether all of it is zero."""
    digest = hashlib.sha256()
    source_dtype = FROM_SAFETENSORS[entry.dtype]
    is_good, is_zero = True, True
    for first, block in weights.row_blocks(entry):
        digest.update(raw_bytes(block))
        is_zero = is_zero and not block.any()
        if not is_good:
            continue
        if not all_finite(block, source_dtype):
            is_good = False
            checks.fail("weights.values", _not_finite(entry, "holds NaN or infinity", "finite values"))
            continue
        values = convert(block, source_dtype, dtype)
        if not all_finite(values, dtype):
            is_good = False
            reason = f"holds values too large for the base model's {dtype}"
            checks.fail("weights.values", _not_finite(entry, reason, f"values within {dtype}"))
        elif sink is not None:
            sink.write(entry, first, values)
    return HashedTensor(entry, digest.digest()), is_zero


def _read_base_copy(weights: SafetensorsFile, copy: BaseCopy, dtype: str, checks: Checks) -> HashedTensor:
    """Accepted only if, in the base's dtype, it is bit for bit the served tensor."""
    entry = copy.entry
    source, converted = hashlib.sha256(), hashlib.sha256()
    for _, block in weights.row_blocks(entry):
        source.update(raw_bytes(block))
        converted.update(raw_bytes(convert(block, FROM_SAFETENSORS[entry.dtype], dtype)))
    if converted.hexdigest() != copy.sha256:
        reason = f"{WEIGHTS_NAME}: {shown_name(entry.name)}: differs from the served base model's"
        found = f"sha256 {converted.hexdigest()[:16]} as {dtype}"
        error = AdapterError(
            "base_weight_differs",
            reason,
            file=WEIGHTS_NAME,
            key=entry.name,
            found=found,
            expected=f"sha256 {copy.sha256[:16]}",
        )
        checks.fail("weights.base_copy", error)
    return HashedTensor(entry, source.digest())


def _other_copy(copy: TensorEntry, original: TensorEntry) -> AdapterError:
    """For a second copy of rows or of an own table, such as a tied `lm_head`'s, of which PEFT loads one."""
    reason = f"differs from {shown_name(original.name)}, of which it should be a copy"
    message = f"{WEIGHTS_NAME}: {shown_name(copy.name)}: {reason}"
    return AdapterError("unexpected_tensor", message, file=WEIGHTS_NAME, key=copy.name)


def _not_finite(entry: TensorEntry, reason: str, expected: str) -> AdapterError:
    message = f"{WEIGHTS_NAME}: {shown_name(entry.name)}: {reason}"
    return AdapterError(
        "not_finite", message, file=WEIGHTS_NAME, key=entry.name, found=reason.removeprefix("holds "), expected=expected
    )

"""The two files of an adapter reduced to what its digest covers, so that equal content is equal whoever sent it.

Author, paths, training settings and metadata are left out, and tensors are in a fixed order. Content is stored once for
all tenants, so nothing else that a tenant wrote, nor the way it was written, may be shown to another.
"""

import json
import os
from collections.abc import Iterable

from loraserve_adapters.config import CAUSAL_LM, FEATURE_EXTRACTION, AdapterConfig
from loraserve_adapters.config_values import SAVED_WITH_HEAD, SEQ_CLS
from loraserve_adapters.safetensors_file import LENGTH_BYTES, WEIGHTS_NAME, TensorEntry

_COPY_BYTES = 4 * 1024 * 1024
_METADATA = {"format": "pt"}
"""As PEFT writes it."""
_DTYPES = ("F32", "BF16", "F16")
"""In the order in which safetensors writes tensors of different dtypes."""


def clean_config(config: AdapterConfig, *, is_headless: bool = False) -> bytes:
    """An `adapter_config.json` that PEFT reads, with the same digest. The task type follows from the tensors' names."""
    fields = {
        "peft_type": "LORA",
        "task_type": SEQ_CLS if config.is_classifier else FEATURE_EXTRACTION if is_headless else CAUSAL_LM,
        "inference_mode": True,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
        "lora_bias": config.lora_bias,
        "use_dora": config.use_dora,
        "alora_invocation_tokens": config.invocation_token_ids or None,
        "bias": "none",
        "target_modules": config.target_modules,
        "target_parameters": config.target_parameters or None,
        "exclude_modules": config.exclude_modules or None,
        "layers_to_transform": config.layers_to_transform or None,
        "layers_pattern": config.layers_pattern or None,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
    }
    if config.trained_tokens:
        tables = dict(config.trained_tokens)
        fields["trainable_token_indices"] = tables.get("", tables)
    if config.ensures_weight_tying:
        fields["ensure_weight_tying"] = True
    if config.is_classifier or config.own_tables:
        fields["modules_to_save"] = [*(SAVED_WITH_HEAD if config.is_classifier else ()), *config.own_tables]
    if config.labels:
        fields["id2label"] = dict(enumerate(config.labels))
    if config.problem_type:
        fields["problem_type"] = config.problem_type
    if config.score_template:
        fields["score_template"] = config.score_template
    if config.chat_template:
        fields["chat_template"] = config.chat_template
    return json.dumps(fields, indent=2, ensure_ascii=False).encode() + b"\n"


def has_clean_weights(first_bytes: bytes, tensors: Iterable[TensorEntry]) -> bool:
    """Whether a file is what `write_clean_weights` would write, as PEFT's are. first_bytes: up to the header's end."""
    return first_bytes == _header(_ordered(tensors))


def write_clean_weights(source: int, target: int, tensors: Iterable[TensorEntry]) -> None:
    """Copies tensors of a weights file in the form that safetensors writes. source, target: file descriptors."""
    ordered = _ordered(tensors)
    _write(target, _header(ordered))
    for entry in ordered:
        position, end = entry.start, entry.start + entry.size_bytes
        while position < end:
            block = os.pread(source, min(_COPY_BYTES, end - position), position)
            if not block:
                raise OSError(f"{WEIGHTS_NAME} became shorter while it was copied")
            _write(target, block)
            position += len(block)


def _ordered(tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
    return sorted(tensors, key=lambda entry: (_DTYPES.index(entry.dtype), entry.name))


def _header(tensors: list[TensorEntry]) -> bytes:
    fields: dict[str, object] = {"__metadata__": _METADATA}
    position = 0
    for entry in tensors:
        offsets = [position, position + entry.size_bytes]
        fields[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        position += entry.size_bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]

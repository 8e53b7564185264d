"""The two files of an adapter reduced to what its digest covers, so that equal content is equal whoever sent it.

Author, paths, training settings and metadata are left out: content is kept once for all tenants, and what one of them
wrote beside it must not be shown to another.
"""

import json
import os

from loraserve_adapters.config import AdapterConfig
from loraserve_adapters.safetensors_file import LENGTH_BYTES, WEIGHTS_NAME, TensorEntry, header_end

_COPY_BYTES = 4 * 1024 * 1024
_METADATA = {"format": "pt"}
"""What PEFT writes."""


def clean_config(config: AdapterConfig) -> bytes:
    """An `adapter_config.json` that PEFT reads, of the same digest."""
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
        "lora_bias": config.lora_bias,
        "bias": "none",
        "target_modules": config.target_modules,
        "exclude_modules": config.exclude_modules or None,
        "layers_to_transform": config.layers_to_transform or None,
        "layers_pattern": (config.layers_pattern or None) if config.layers_to_transform else None,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
    }
    return json.dumps(fields, indent=2).encode() + b"\n"


def has_own_metadata(first_bytes: bytes, file_size: int) -> bool:
    """Whether the header, which must have been judged, says more than where the tensors are."""
    header = json.loads(first_bytes[LENGTH_BYTES : header_end(first_bytes, file_size)])
    return header.get("__metadata__", {}) not in ({}, _METADATA)


def write_clean_weights(source: int, target: int, tensors: tuple[TensorEntry, ...]) -> None:
    """Copies a weights file with a new header. source, target: descriptors; tensors: all of the source, by position."""
    data_start = tensors[0].start if tensors else 0
    header: dict[str, object] = {"__metadata__": _METADATA}
    for entry in tensors:
        start = entry.start - data_start
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [start, start + entry.size_bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _write(target, len(text).to_bytes(LENGTH_BYTES, "little") + text)
    position, end = data_start, data_start + sum(entry.size_bytes for entry in tensors)
    while position < end:
        block = os.pread(source, min(_COPY_BYTES, end - position), position)
        if not block:
            raise OSError(f"{WEIGHTS_NAME} became shorter while it was copied")
        _write(target, block)
        position += len(block)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]

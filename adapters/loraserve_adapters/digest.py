"""The digest that identifies an adapter's content: sha256 over the config's meaning and the tensors' bytes.

It does not depend on the order of tensors in the file, on metadata, or on config fields without effect at inference.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from loraserve_adapters.config import AdapterConfig
from loraserve_adapters.safetensors_file import TensorEntry

_TAG = b"loraserve adapter 1"


@dataclass(frozen=True, slots=True)
class HashedTensor:
    entry: TensorEntry
    sha256: bytes
    """Of the tensor's bytes as they are in the file."""


def adapter_digest(config: AdapterConfig, tensors: Iterable[HashedTensor]) -> str:
    """64 hexadecimal characters. Every field is preceded by its length, so different inputs never run together."""
    digest = hashlib.sha256()

    def update(field: bytes) -> None:
        digest.update(len(field).to_bytes(8, "big"))
        digest.update(field)

    update(_TAG)
    update(canonical_config(config))
    for tensor in sorted(tensors, key=lambda tensor: tensor.entry.name):
        update(tensor.entry.name.encode())
        update(tensor.entry.dtype.encode())
        update(json.dumps(tensor.entry.shape).encode())
        update(tensor.sha256)
    return digest.hexdigest()


def canonical_config(config: AdapterConfig) -> bytes:
    """JSON with sorted keys of the fields that decide the computation, with PEFT's defaults filled in.

    A list of targets is a set, so sorted; patterns keep their order, because the first match wins; alphas are floats.
    """
    fields = {
        "alpha_pattern": config.alpha_pattern,
        "exclude_modules": config.exclude_modules,
        "layers_pattern": config.layers_pattern,
        "layers_to_transform": config.layers_to_transform,
        "lora_alpha": config.lora_alpha,
        "lora_rank": config.lora_rank,
        "rank_pattern": config.rank_pattern,
        "target_modules": config.target_modules,
        "use_rslora": config.use_rslora,
        **({"lora_bias": True} if config.lora_bias else {}),
        **({"use_dora": True} if config.use_dora else {}),
        **({"invocation_token_ids": config.invocation_token_ids} if config.invocation_token_ids else {}),
        **({"trained_tokens": config.trained_tokens} if config.trained_tokens else {}),
        **({"own_tables": config.own_tables} if config.own_tables else {}),
        **({"ensure_weight_tying": True} if config.ensures_weight_tying else {}),
        **({"target_parameters": config.target_parameters} if config.target_parameters else {}),
        **({"is_classifier": True} if config.is_classifier else {}),
        **({"labels": config.labels} if config.labels else {}),
        **({"problem_type": config.problem_type} if config.problem_type else {}),
        **({"score_template": config.score_template} if config.score_template else {}),
        **({"chat_template": config.chat_template} if config.chat_template else {}),
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

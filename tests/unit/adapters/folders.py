"""Builders of valid and hostile adapter folders, and of layouts to read them against. Needs only numpy."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.dtypes import STORAGE, convert
from loraserve_adapters.packed_file import layout_fingerprint

HIDDEN, INTERMEDIATE, KEY_VALUE, VOCABULARY = 32, 48, 16, 64
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KEY_VALUE),
    "self_attn.v_proj": (HIDDEN, KEY_VALUE),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}
"""(in_features, out_features)"""
GROUPED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

RawTensor = tuple[str, Sequence[int], bytes]
"""dtype, shape, bytes"""


def head_weight() -> np.ndarray:
    return np.random.default_rng(7).standard_normal((VOCABULARY, HIDDEN), np.float32)


def tiny_layout(dtype: str = "float32", num_layers: int = 2) -> BaseLayout:
    """A Llama-like base model."""
    groups = [
        tuple(BaseModule(f"model.layers.{layer}.{name}", *LINEARS[name]) for name in names)
        for layer in range(num_layers)
        for names in GROUPED
    ]
    head_sha256 = hashlib.sha256(convert(head_weight(), "float32", dtype).tobytes()).hexdigest()
    groups.append((BaseModule("lm_head", HIDDEN, VOCABULARY, head_sha256),))
    containers = [f"model.layers.{layer}{part}" for layer in range(num_layers) for part in ("", ".self_attn", ".mlp")]
    return BaseLayout(
        fingerprint=layout_fingerprint(tuple(groups), dtype),
        dtype=dtype,
        groups=tuple(groups),
        hidden_size=HIDDEN,
        other_modules=("model", "model.embed_tokens", "model.layers", *containers, "model.norm"),
        embedding_modules=("model.embed_tokens",),
    )


def with_embedding(layout: BaseLayout) -> BaseLayout:
    """The same layout with an embedding that can have adapters and is tied to `lm_head`."""
    name, ((head,), *_) = layout.embedding_modules[0], layout.groups[::-1]
    embedding = BaseModule(name, head.out_features, head.in_features, head.weight_sha256, is_embedding=True)
    groups = ((embedding,), *layout.groups[:-1], (replace(head, is_tied=True),))
    return replace(
        layout,
        fingerprint=layout_fingerprint(groups, layout.dtype),
        groups=groups,
        other_modules=tuple(module for module in layout.other_modules if module != name),
        embedding_modules=(),
    )


NUM_EXPERTS, OF_EXPERT = 4, 24
"""OF_EXPERT: an expert's intermediate size."""


def experts_layout(dtype: str = "float32", num_layers: int = 2, *, shared_expert: bool = False) -> BaseLayout:
    """A base model with routers and experts, and optionally an expert made of linears that all tokens share."""
    groups: list[tuple[BaseModule, ...]] = []
    for layer in (f"model.layers.{number}" for number in range(num_layers)):
        up = BaseModule(
            f"{layer}.mlp.experts.gate_up_proj", HIDDEN, 2 * OF_EXPERT, None, NUM_EXPERTS, ("gate_proj", "up_proj")
        )
        down = BaseModule(f"{layer}.mlp.experts.down_proj", OF_EXPERT, HIDDEN, None, NUM_EXPERTS, ("down_proj",))
        groups += [
            (BaseModule(f"{layer}.self_attn.q_proj", HIDDEN, HIDDEN),),
            (BaseModule(f"{layer}.mlp.gate.weight", HIDDEN, NUM_EXPERTS, num_matrices=1),),
            (up,),
            (down,),
        ]
        if shared_expert:
            groups.append((BaseModule(f"{layer}.mlp.shared_expert.gate_proj", HIDDEN, INTERMEDIATE),))
    parts = ("", ".self_attn", ".mlp", ".mlp.gate", ".mlp.experts", *([".mlp.shared_expert"] if shared_expert else []))
    containers = [f"model.layers.{layer}{part}" for layer in range(num_layers) for part in parts]
    return BaseLayout(
        fingerprint=layout_fingerprint(tuple(groups), dtype),
        dtype=dtype,
        groups=tuple(groups),
        other_modules=("model", "model.embed_tokens", "model.layers", *containers, "model.norm"),
        embedding_modules=("model.embed_tokens",),
    )


TOWER_LINEARS = tuple(f"model.vision_tower.layers.{n}.self_attn.{p}" for n in range(3) for p in ("q_proj", "out_proj"))


def multimodal_layout() -> BaseLayout:
    """`tiny_layout` with a vision tower that has one more layer, and a projection that is called for text."""
    text = tiny_layout()
    groups = tuple(
        tuple(replace(module, name=module.name.replace("model.", "model.language_model.")) for module in group)
        for group in text.groups
    )
    others = (
        "model",
        "model.vision_tower",
        "model.vision_tower.conv",
        *TOWER_LINEARS,
        "model.projection",
        "model.norm",
    )
    return replace(
        text,
        fingerprint=layout_fingerprint(groups, text.dtype),
        groups=groups,
        other_modules=others,
        embedding_modules=(),
        unreached_linears=TOWER_LINEARS,
    )


def tower_tensors(names: Sequence[str] = TOWER_LINEARS, rank: int = 4) -> dict[str, RawTensor]:
    return {lora_key(name, side): raw_tensor(np.ones((rank, 5), np.float32)) for name in names for side in "AB"}


def safetensors_bytes(tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return with_header(json.dumps(header).encode(), data)


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def lora_key(module: str, side: str) -> str:
    return f"base_model.model.{module}.lora_{side}.weight"


def raw_tensor(values: np.ndarray, dtype: str = "float32") -> RawTensor:
    return SAFETENSORS_DTYPES[dtype], values.shape, convert(values, "float32", dtype).tobytes()


def lora_tensors(
    layout: BaseLayout, suffixes: Sequence[str], rank: int = 4, dtype: str = "float32", seed: int = 0
) -> dict[str, RawTensor]:
    """Random A and B for every module of the layout whose name ends with one of the suffixes."""
    random = np.random.default_rng(seed)
    tensors: dict[str, RawTensor] = {}
    for module in (module for group in layout.groups for module in group):
        if module.name.endswith(tuple(suffixes)):
            a = random.standard_normal((rank, module.in_features), np.float32)
            b = random.standard_normal((module.out_features, rank), np.float32)
            tensors[lora_key(module.name, "A")] = raw_tensor(a, dtype)
            tensors[lora_key(module.name, "B")] = raw_tensor(b, dtype)
    return tensors


def magnitude_key(module: str) -> str:
    return f"base_model.model.{module}.lora_magnitude_vector"


def with_magnitudes(tensors: Mapping[str, RawTensor], dtype: str = "float32", seed: int = 0) -> dict[str, RawTensor]:
    """The tensors of DoRA: a random magnitude for each output of every B, then the given tensors."""
    random = np.random.default_rng(seed)
    magnitudes: dict[str, RawTensor] = {}
    for name, (_, (out_features, *_), _) in tensors.items():
        if name.endswith(".lora_B.weight"):
            values = random.standard_normal(out_features, np.float32)
            magnitudes[name.replace("lora_B.weight", "lora_magnitude_vector")] = raw_tensor(values, dtype)
    return magnitudes | {**tensors}


def lora_pair(
    owner: str, in_features: int, out_features: int, rank: int = 4, *, dtype: str = "float32", seed: int = 0
) -> dict[str, RawTensor]:
    """Random A and B for a module name, whether or not the layout has such a module."""
    random = np.random.default_rng([seed, *owner.encode()])
    a = random.standard_normal((rank, in_features), np.float32)
    b = random.standard_normal((out_features, rank), np.float32)
    return {lora_key(owner, "A"): raw_tensor(a, dtype), lora_key(owner, "B"): raw_tensor(b, dtype)}


def config_of(**fields: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **fields}


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    return folder


def values_of(tensor: RawTensor) -> np.ndarray:
    """The tensor as float32."""
    names = {short: long for long, short in SAFETENSORS_DTYPES.items()}
    dtype = names[tensor[0]]
    return convert(np.frombuffer(tensor[2], STORAGE[dtype]).reshape(tensor[1]), dtype, "float32")

"""Bad adapters, made on the fly: each has one fault and must be refused for it."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.unit.adapters.folders import (
    HIDDEN,
    RawTensor,
    config_of,
    head_weight,
    lora_key,
    lora_tensors,
    raw_tensor,
    safetensors_bytes,
    tiny_layout,
    values_of,
    with_header,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LAYOUT = tiny_layout()
Q0 = "model.layers.0.self_attn.q_proj"
A0, B0 = lora_key(Q0, "A"), lora_key(Q0, "B")
HEADLESS_A0 = A0.replace("model.model.", "model.")
BIAS0 = B0.replace("weight", "bias")
BASE_BIAS0 = f"base_model.model.{Q0}.base_layer.bias"
NORM_BIAS = "base_model.model.model.norm.bias"
MAGNITUDE0 = f"base_model.model.{Q0}.lora_magnitude_vector"
ZEROS = np.zeros((4, HIDDEN), np.float32)

Tensors = dict[str, RawTensor]


@dataclass(frozen=True)
class Artifact:
    name: str
    make: Callable[[], dict[str, bytes]]
    code: str
    key: str | None = None
    """Text that the failed check's key must contain; None = any key."""


def good_tensors() -> Tensors:
    return lora_tensors(LAYOUT, ["q_proj"])


def files(config: bytes | None = None, weights: bytes | None = None) -> dict[str, bytes]:
    return {
        CONFIG: json.dumps(config_of()).encode() if config is None else config,
        WEIGHTS: safetensors_bytes(good_tensors(), {"format": "pt"}) if weights is None else weights,
    }


def bad_field(field: str, value: Any, code: str = "unsupported_option", key: str | None = None) -> Artifact:
    config = json.dumps(config_of(**{field: value})).encode()
    return Artifact(f"{field}={str(value)[:30]}", lambda: files(config), code, key or field)


def bad_config(name: str, config: bytes, code: str, key: str | None = None) -> Artifact:
    return Artifact(name, lambda: files(config), code, key)


def bad_weights(name: str, make: Callable[[], bytes], code: str, key: str | None = None) -> Artifact:
    return Artifact(name, lambda: files(weights=make()), code, key)


def bad_header(name: str, header: Any, data_size: int, code: str = "bad_safetensors") -> Artifact:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bad_weights(name, lambda: with_header(raw, bytes(data_size)), code)


def bad_tensors(
    name: str, change: Callable[[Tensors], object], code: str, key: str | None = None, **fields: Any
) -> Artifact:
    def make() -> dict[str, bytes]:
        tensors = good_tensors()
        change(tensors)
        return files(json.dumps(config_of(**fields)).encode(), safetensors_bytes(tensors, {"format": "pt"}))

    return Artifact(name, make, code, key)


def entry(start: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


def put(name: str, tensor: RawTensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def renamed(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def as_headless(tensors: Tensors) -> None:
    for name in [*tensors]:
        renamed(name, name.replace("model.model.", "model."))(tensors)


def poisoned(name: str, value: float, dtype: str = "float32") -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        values = values_of(tensors[name]).copy()
        values[-1, -1] = value
        if dtype == "bfloat16":
            tensors[name] = ("BF16", values.shape, (values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        else:
            tensors[name] = raw_tensor(values, dtype)

    return change


def with_nan_magnitudes(tensors: Tensors) -> None:
    for layer in range(2):
        name = MAGNITUDE0.replace("layers.0", f"layers.{layer}")
        tensors[name] = raw_tensor(np.full(HIDDEN, np.nan, np.float32))


def million_keys() -> bytes:
    """A header of about 4.6 MB: below the byte limit, above the tensor limit."""
    one = '"%x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return with_header(("{" + ",".join(one % index for index in range(75_000)) + "}").encode())


def many_config_keys() -> bytes:
    return ("{" + ",".join(f'"k{index}":1' for index in range(1_000_000)) + "}").encode()


def redos(pattern: str, field: str = "target_modules") -> dict[str, Any]:
    if field == "target_modules":
        return config_of(target_modules=pattern)
    return config_of(target_modules="all-linear", **{field: {pattern: 4}})


GOOD = safetensors_bytes(good_tensors(), {"format": "pt"})

CONFIG_LIES = [
    bad_field("modules_to_save", ["norm"]),
    bad_field("bias", "lora_only"),
    bad_field("bias", "some"),
    bad_field("fan_in_fan_out", True),
    bad_field("use_qalora", True),
    bad_field("use_bdlora", {"nblocks": 2}),
    bad_field("velora_config", {}),
    bad_field("kasa_config", {"beta": 1}),
    bad_field("monteclora_config", {}),
    bad_field("arrow_config", {"top_k": 2}),
    bad_field("alora_invocation_tokens", [], "invalid_field"),
    bad_field("alora_invocation_tokens", [1, -2], "invalid_field"),
    bad_field("alora_invocation_tokens", [1] * 65, "too_large"),
    bad_field("trainable_token_indices", [1], "unsupported_module"),
    bad_field("trainable_token_indices", [], "invalid_field"),
    bad_field("trainable_token_indices", [True], "invalid_field"),
    bad_field("trainable_token_indices", {"lm_head": {}}, "invalid_field", "trainable_token_indices.lm_head"),
    bad_field("trainable_token_indices", [*range(129)], "too_large"),
    bad_field("trainable_token_indices", {"lm_head" * 100: [1]}, "too_large"),
    bad_field("target_parameters", "experts.w", "invalid_field"),
    bad_field("layer_replication", [[0, 2], [0, 2]]),
    bad_field("ensure_weight_tying", 1, "invalid_field"),
    bad_field("megatron_config", {"a": 1}),
    bad_field("runtime_config", {"ephemeral_gpu_offload": True}),
    bad_field("task_type", "TOKEN_CLS"),
    bad_field("enable_lora", [True]),
    bad_field("merge_weights", True),
    *(
        bad_field("init_lora_weights", init)
        for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
    ),
    bad_field("init_lora_weights", "unheard_of"),
    *(bad_field("peft_type", kind) for kind in ("ADALORA", "IA3", "LOHA", "VERA", "PREFIX_TUNING")),
    bad_field("lora_gamma", 1, "unknown_field"),
    bad_field("__class__", "os.system", "unknown_field"),
    bad_field("r", 0, "invalid_field"),
    bad_field("r", -1, "invalid_field"),
    bad_field("r", 10**9, "rank_too_large"),
    bad_field("r", 10**400, "rank_too_large"),
    bad_field("r", 8, "rank_mismatch", A0),
    bad_field("r", "4", "invalid_field"),
    bad_field("r", 4.0, "invalid_field"),
    bad_field("lora_alpha", 1e300, "invalid_field"),
    bad_field("lora_alpha", "8", "invalid_field"),
    bad_field("lora_bias", "yes", "invalid_field"),
    bad_field("lora_bias", True, "missing_tensor", BIAS0),
    bad_field("use_dora", 1, "invalid_field"),
    bad_field("use_dora", True, "missing_tensor", MAGNITUDE0),
    *(
        bad_config(f"dora_with_{name}", json.dumps(config_of(use_dora=True, **{name: value})).encode(), *refused)
        for refused in [("invalid_field", "use_dora")]
        for name, value in [("lora_bias", True), ("alora_invocation_tokens", [1]), ("target_parameters", ["experts.w"])]
    ),
    bad_field("target_modules", [], "invalid_field"),
    bad_field("target_modules", None, "invalid_field"),
    bad_field("target_modules", ["no_such_proj"], "unknown_module"),
    bad_field("target_modules", ["embed_tokens", "q_proj"], "unsupported_module"),
    bad_field("target_modules", ["mlp", "q_proj"], "unsupported_module"),
    bad_field("target_modules", "(q_proj", "bad_pattern"),
    bad_field("target_modules", r"(q_proj)\1", "unsupported_pattern"),
    bad_field("target_modules", "(?i)q_proj", "unsupported_pattern"),
    bad_field("target_modules", "a" * 600, "too_large"),
    bad_field("target_modules", ["q_proj", "k_proj"], "missing_tensor", A0.replace("q_proj", "k_proj")),
    bad_field("exclude_modules", ["q_proj"], "unknown_module", "target_modules"),
    bad_field("layers_to_transform", [7], "unknown_module"),
    bad_field("layers_to_transform", [-1], "invalid_field"),
    bad_field("layers_pattern", "layers", "invalid_field"),
    bad_field("rank_pattern", {"q_proj": 10**6}, "rank_too_large", "rank_pattern.q_proj"),
    bad_field("rank_pattern", {"q_proj": 2}, "rank_mismatch", A0),
    bad_field("rank_pattern", {"(?<=a)b": 4}, "unsupported_pattern"),
    bad_field("alpha_pattern", {"q_proj": None}, "invalid_field", "alpha_pattern.q_proj"),
    bad_field("lora_dropout", "0.1", "invalid_field"),
    bad_field("auto_mapping", "os", "invalid_field"),
    bad_config("redos_nested_plus", json.dumps(redos("(((a+)+)+)+!")).encode(), "unknown_module", "target_modules"),
    bad_config("redos_alternation", json.dumps(redos("(a|a|aa)*" * 40 + "#")).encode(), "unknown_module"),
]

BROKEN_CONFIGS = [
    bad_config("empty_config", b"", "bad_json"),
    bad_config("config_is_a_list", b"[]", "bad_json"),
    bad_config("truncated_config", b'{"peft_type": "LORA"', "bad_json"),
    bad_config("nan_in_config", b'{"peft_type": "LORA", "lora_alpha": NaN}', "bad_json"),
    bad_config("utf16_config", json.dumps(config_of()).encode("utf-16"), "bad_json"),
    bad_config("byte_order_mark", b"\xef\xbb\xbf" + json.dumps(config_of()).encode(), "bad_json"),
    bad_config("lone_surrogate", b'{"peft_type": "LORA", "revision": "\\ud800"}', "bad_json"),
    bad_config("deep_config", b'{"a": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "bad_json"),
    bad_config("huge_number", b'{"r": ' + b"9" * 50_000 + b"}", "bad_json"),
    bad_config("trailing_object", json.dumps(config_of()).encode() + b"{}", "bad_json"),
    bad_config("duplicate_r", b'{"peft_type":"LORA","r":4,"r":8,"target_modules":["q_proj"]}', "duplicate_key", "r"),
    bad_config("pickled_config", b"\x80\x04\x95\x10\x00\x00\x00cos\nsystem\n(S'id'\ntR.", "bad_json"),
    bad_config(
        "homoglyph_field",
        json.dumps({**config_of(), "rаnk_pattern": {"q_proj": 4}}).encode(),  # a Cyrillic а
        "unknown_field",
    ),
    bad_config(
        "homoglyph_target",
        json.dumps(config_of(target_modules=["q_prоj"])).encode(),  # a Cyrillic о
        "unknown_module",
        "target_modules",
    ),
    bad_config(
        "right_to_left_field", json.dumps({**config_of(), "\u202ekcart": 1}).encode(), "unknown_field", "\\u202e"
    ),
]

BROKEN_HEADERS = [
    bad_weights("empty_weights", lambda: b"", "bad_safetensors"),
    bad_weights("four_bytes", lambda: b"abcd", "bad_safetensors"),
    bad_weights("header_longer_than_file", lambda: struct.pack("<Q", 10_000) + b"{}", "bad_safetensors"),
    bad_weights("header_of_2_to_the_63", lambda: struct.pack("<Q", 2**63) + bytes(100), "too_large"),
    bad_weights("header_bomb", lambda: struct.pack("<Q", 2**64 - 1) + bytes(100), "too_large"),
    bad_weights("header_over_the_limit", lambda: with_header(b"{}" + b" " * (17 << 20)), "too_large"),
    bad_weights("pickle_renamed", lambda: b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01u." * 10, "too_large"),
    bad_weights("zip_renamed", lambda: b"PK\x03\x04" + bytes(200), "too_large"),
    bad_weights("gguf_renamed", lambda: b"GGUF\x03\x00\x00\x00" + bytes(200), "too_large"),
    bad_weights("truncated_weights", lambda: GOOD[:-8], "bad_safetensors"),
    bad_weights("half_a_file", lambda: GOOD[: len(GOOD) // 2], "bad_safetensors"),
    bad_weights("trailing_byte", lambda: GOOD + b"x", "bad_safetensors"),
    bad_weights("second_file_appended", lambda: GOOD + GOOD, "bad_safetensors"),
    bad_weights("75_000_tensors", million_keys, "too_large"),
    bad_header("overlapping_offsets", {"a": entry(0, 8), "b": entry(4, 12)}, 12),
    bad_header("same_bytes_twice", {"a": entry(0, 8), "b": entry(0, 8)}, 8),
    bad_header("hole", {"a": entry(0, 4), "b": entry(8, 12)}, 12),
    bad_header("starts_late", {"a": entry(4, 8)}, 8),
    bad_header("reversed_offsets", {"a": entry(8, 4, shape=[1])}, 8),
    bad_header("offsets_beyond_the_file", {"a": entry(0, 1 << 40)}, 8),
    bad_header("negative_offset", {"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, 4),
    bad_header("shape_times_dtype_is_not_the_size", {"a": entry(0, 8, shape=[3])}, 8),
    bad_header("negative_shape", {"a": entry(0, 8, shape=[-2])}, 8),
    bad_header("shape_overflows_64_bits", {"a": entry(0, 0, shape=[2**62, 2**62])}, 0),
    bad_header("nine_dimensions", {"a": entry(0, 4, shape=[1] * 9)}, 4),
    bad_header("boolean_size", {"a": entry(0, 4, shape=[True])}, 4),
    bad_header("unknown_dtype", {"a": entry(0, 4, dtype="F128")}, 4, "bad_dtype"),
    bad_header("extra_field", {"a": {**entry(0, 4), "loader": "os.system"}}, 4),
    bad_header("metadata_is_a_list", {"__metadata__": ["a"]}, 0),
    bad_header("nested_metadata", {"__metadata__": {"a": {"b": "c"}}}, 0),
    bad_header("header_is_a_list", b"[1]", 0),
    bad_header("header_after_a_space", b" {}", 0),
    bad_header("header_is_not_utf8", b'{"\xff":1}', 0),
    bad_header("deep_header", b'{"a":' + b"[" * 100_000 + b"}", 0),
    bad_header(
        "duplicate_tensor",
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        4,
        "duplicate_tensor",
    ),
    bad_header(
        "duplicate_dtype",
        b'{"a":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}',
        4,
        "duplicate_tensor",
    ),
]

WRONG_TENSORS = [
    bad_tensors("no_tensors", lambda tensors: tensors.clear(), "missing_tensor", A0),
    bad_tensors("no_a", lambda tensors: tensors.pop(A0), "missing_tensor", A0),
    bad_tensors("no_b", lambda tensors: tensors.pop(B0), "missing_tensor", B0),
    bad_tensors("other_rank", put(A0, raw_tensor(ZEROS[:3])), "rank_mismatch", A0),
    bad_tensors("rank_0", put(A0, ("F32", [0, HIDDEN], b"")), "rank_mismatch", A0),
    bad_tensors("other_hidden_size", put(A0, raw_tensor(ZEROS[:, :31])), "shape_mismatch", A0),
    bad_tensors("transposed_b", put(B0, raw_tensor(ZEROS)), "shape_mismatch", B0),
    bad_tensors("flat_a", put(A0, raw_tensor(ZEROS.reshape(-1))), "shape_mismatch", A0),
    bad_tensors("float64", put(A0, ("F64", [4, HIDDEN], bytes(1024))), "bad_dtype", A0),
    bad_tensors("int8", put(A0, ("I8", [4, HIDDEN], bytes(128))), "bad_dtype", A0),
    bad_tensors("float8", put(A0, ("F8_E4M3", [4, HIDDEN], bytes(128))), "bad_dtype", A0),
    bad_tensors("nan", poisoned(A0, np.nan), "not_finite", A0),
    bad_tensors("infinity", poisoned(B0, np.inf), "not_finite", B0),
    bad_tensors("minus_infinity_float16", poisoned(B0, -np.inf, "float16"), "not_finite", B0),
    bad_tensors("nan_bfloat16", poisoned(B0, np.nan, "bfloat16"), "not_finite", B0),
    bad_tensors("other_base_model", renamed(A0, A0.replace("model.layers", "transformer.h")), "unknown_module"),
    bad_tensors("layer_9", renamed(A0, A0.replace("layers.0", "layers.9")), "unknown_module"),
    bad_tensors("adapter_name_in_key", renamed(A0, A0.replace("lora_A", "lora_A.default")), "unexpected_tensor"),
    bad_tensors("no_prefix", renamed(A0, A0.removeprefix("base_model.model.")), "unexpected_tensor"),
    bad_tensors("headless_of_a_causal_model", as_headless, "unknown_module", HEADLESS_A0, task_type="CAUSAL_LM"),
    bad_tensors(
        "headless_beside_whole", renamed(A0, HEADLESS_A0), "unknown_module", HEADLESS_A0, task_type="FEATURE_EXTRACTION"
    ),
    bad_tensors(
        "headless_by_names_of_the_whole",
        as_headless,
        "unknown_module",
        "target_modules",
        task_type="FEATURE_EXTRACTION",
        target_modules=r"model\.layers\..*q_proj",
    ),
    bad_tensors("untargeted", renamed(A0, A0.replace("q_proj", "k_proj")), "unexpected_tensor"),
    bad_tensors("empty_name", put("", raw_tensor(ZEROS)), "unexpected_tensor"),
    bad_tensors("traversal_name", put("../../../etc/passwd", raw_tensor(ZEROS)), "unexpected_tensor", "../../.."),
    bad_tensors("nul_in_name", put("base_model.model.\x00", raw_tensor(ZEROS)), "unexpected_tensor", "\\u0000"),
    bad_tensors("homoglyph_name", renamed(A0, A0.replace("proj", "prоj")), "unknown_module"),
    bad_tensors("long_name", put("x" * 100_000, raw_tensor(ZEROS)), "unexpected_tensor", "x"),
    bad_tensors(
        "dora_hidden",
        put(MAGNITUDE0, ("F32", [HIDDEN], bytes(128))),
        "unexpected_tensor",
        "magnitude",
    ),
    bad_tensors(
        "dora_of_another_size",
        put(MAGNITUDE0, ("F32", [HIDDEN + 1], bytes(132))),
        "shape_mismatch",
        MAGNITUDE0,
        use_dora=True,
    ),
    bad_tensors(
        "dora_as_a_column",
        put(MAGNITUDE0, ("F32", [HIDDEN, 1], bytes(128))),
        "shape_mismatch",
        MAGNITUDE0,
        use_dora=True,
    ),
    bad_tensors(
        "dora_in_float64", put(MAGNITUDE0, ("F64", [HIDDEN], bytes(256))), "bad_dtype", MAGNITUDE0, use_dora=True
    ),
    bad_tensors("dora_nan", with_nan_magnitudes, "not_finite", MAGNITUDE0, use_dora=True),
    *(
        bad_tensors(f"all {name}", put(name, ("F32", [32], bytes(128))), "unexpected_tensor", name, bias="all")
        for name in (NORM_BIAS, BASE_BIAS0)
    ),
    bad_tensors("bias_hidden", put(BIAS0, ("F32", [32], bytes(128))), "unexpected_tensor", "bias"),
    bad_tensors(
        "bias_of_another_size",
        put(BIAS0, ("F32", [31], bytes(124))),
        "shape_mismatch",
        "bias",
        lora_bias=True,
    ),
    bad_tensors(
        "embedding_lora",
        put("base_model.model.model.embed_tokens.lora_embedding_A", raw_tensor(ZEROS)),
        "unsupported_module",
    ),
    bad_tensors(
        "saved_embedding",
        put("base_model.model.model.embed_tokens.weight", raw_tensor(head_weight())),
        "unexpected_tensor",
        "embed_tokens",
    ),
    bad_tensors("norm_replaced", put("base_model.model.model.norm.weight", raw_tensor(ZEROS)), "unexpected_tensor"),
    bad_tensors(
        "base_weight_smuggled",
        put(f"base_model.model.{Q0}.base_layer.weight", raw_tensor(np.ones((32, 32), np.float32))),
        "unexpected_tensor",
    ),
    bad_tensors(
        "lm_head_replaced",
        put("base_model.model.lm_head.weight", raw_tensor(head_weight() + 1)),
        "base_weight_differs",
        "lm_head",
    ),
    bad_tensors(
        "lm_head_of_another_size",
        put("base_model.model.lm_head.base_layer.weight", raw_tensor(head_weight()[:-1])),
        "base_weight_differs",
        "lm_head",
    ),
]  # fmt: skip

ARTIFACTS = CONFIG_LIES + BROKEN_CONFIGS + BROKEN_HEADERS + WRONG_TENSORS

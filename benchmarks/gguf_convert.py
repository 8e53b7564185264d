"""Writes a Llama model and its adapters as GGUF, for llama.cpp. Needs the `gguf` package in addition to torch."""

import json
from pathlib import Path

import gguf  # pyright: ignore[reportMissingImports] - none of our dependencies
import numpy as np
import torch
from safetensors.torch import load_file

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(model: Path, adapters: list[Path], folder: Path) -> Path:
    """Returns the folder, which has model.gguf and one file per adapter. Keeps files that exist."""
    folder.mkdir(parents=True, exist_ok=True)
    _convert_model(model, folder / "model.gguf")
    for adapter in adapters:
        _convert_adapter(model, adapter, folder / f"{adapter.name}.gguf")
    return folder


def _convert_model(model: Path, path: Path) -> None:
    """bfloat16 matrices, float32 norms. Requests are token ids, so the vocabulary needs no text."""
    if path.exists():
        return
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_vocabulary(writer, config["vocab_size"])
    for name, tensor in load_file(model / "model.safetensors").items():
        module, _, _ = name.rpartition(".weight")
        tensor = _rows_for_rope(module, tensor, config)
        _add(writer, f"{_gguf_name(module)}.weight", tensor, torch.bfloat16 if tensor.ndim == 2 else torch.float32)
    _finish(writer)


def _convert_adapter(model: Path, adapter: Path, path: Path) -> None:
    """float16: the narrowest type that llama.cpp accepts for adapters without quantizing them."""
    if path.exists():
        return
    config = json.loads((model / "config.json").read_text())
    lora_config = json.loads((adapter / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(lora_config["lora_alpha"]))
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        if side == "lora_B":
            tensor = _rows_for_rope(module, tensor, config)
        _add(writer, f"{_gguf_name(module)}.weight.{side.lower()}", tensor, torch.float16)
    _finish(writer)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """The byte tokens that llama.cpp looks up when it loads a model, then arbitrary names."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{i:02X}>" if i < 256 else f"token{i}" for i in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([gguf.TokenType.BYTE if i < 256 else gguf.TokenType.NORMAL for i in range(size)])
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)


def _gguf_name(module: str) -> str:
    if module in TOP_NAMES:
        return TOP_NAMES[module]
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[inner]}"


def _rows_for_rope(module: str, tensor: torch.Tensor, config: dict) -> torch.Tensor:
    """Reorders the rows for RoPE: llama.cpp rotates neighboring pairs of a head, transformers its two halves."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    count = heads.get(module.rpartition(".")[2])
    if count is None:
        return tensor
    return tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    tensor = tensor.to(dtype).contiguous()
    if dtype is torch.bfloat16:
        data = tensor.view(torch.uint8).numpy()
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

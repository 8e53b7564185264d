"""Tiny random models of every supported family, scaled so that each feature of the family changes the greedy tokens."""

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MiniCPM3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
    YoutuConfig,
)

VOCAB_SIZE = 260
EOS_TOKEN_ID = 257
WINDOW = 12
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
}
PHI3_ORIGINAL_LENGTH = 64


def _phi3() -> PreTrainedConfig:
    half_head = COMMON["hidden_size"] // COMMON["num_attention_heads"] // 2
    return Phi3Config(
        **COMMON | {"hidden_size": 64},
        original_max_position_embeddings=PHI3_ORIGINAL_LENGTH,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": PHI3_ORIGINAL_LENGTH,
            "short_factor": [1.0 + 0.1 * i for i in range(half_head)],
            "long_factor": [2.0 + 0.7 * i for i in range(half_head)],
        },
    )


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON, head_dim=16),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen3": lambda: Qwen3Config(**COMMON | {"tie_word_embeddings": True}, head_dim=24),
    "mistral": lambda: MistralConfig(**COMMON, head_dim=16, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **COMMON | {"num_hidden_layers": 4, "tie_word_embeddings": True},
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON | {"num_hidden_layers": 4, "tie_word_embeddings": True},
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": _phi3,
    "olmo2": lambda: Olmo2Config(**COMMON),
    "granite": lambda: GraniteConfig(
        **COMMON, attention_multiplier=0.4, embedding_multiplier=2.0, residual_multiplier=0.6, logits_scaling=2.0
    ),
    "smollm3": lambda: SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1]),
}
EXPERTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **COMMON,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[0],
    ),
    "gpt_oss": lambda: GptOssConfig(
        **COMMON,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
"""Mixture-of-experts models. For float32 only: rounding to bfloat16 may route a row to other experts."""


RECURRENT: dict[str, Callable[[], PreTrainedConfig]] = {
    "granite_hybrid": lambda: GraniteMoeHybridConfig(
        **COMMON | {"num_hidden_layers": 4},
        layer_types=["mamba", "attention"] * 2,
        mamba_expand=1,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=4,
        mamba_n_groups=2,
        num_local_experts=0,
        shared_intermediate_size=112,
        attention_multiplier=0.4,
        residual_multiplier=0.6,
    ),
    "lfm2": lambda: Lfm2Config(
        **COMMON | {"num_hidden_layers": 4}, layer_types=["conv", "full_attention"] * 2, block_multiple_of=16
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **COMMON | {"num_hidden_layers": 4},
        head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
}
"""Models with recurrent layers: Mamba-2, short convolutions, gated delta nets."""

LATENT: dict[str, Callable[[], PreTrainedConfig]] = {
    "minicpm3": lambda: MiniCPM3Config(
        **COMMON | {"num_key_value_heads": 4},
        kv_lora_rank=24,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=20,
    ),
    "youtu": lambda: YoutuConfig(
        **COMMON | {"num_key_value_heads": 4, "pad_token_id": None},  # transformers would clear its row at load
        kv_lora_rank=40,
        q_lora_rank=None,
        qk_nope_head_dim=12,
        qk_rope_head_dim=16,
        v_head_dim=28,
    ),
}
"""Models with multi-head latent attention."""

FAMILIES = CONFIGS | EXPERTS | RECURRENT | LATENT


def multimodal_config() -> Gemma3Config:
    """A text model of `CONFIGS` next to an image tower, whose linears have the same names as the text model's."""
    return Gemma3Config(
        text_config=CONFIGS["gemma3"]().to_dict(),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=259,
        tie_word_embeddings=True,
    )


def model_with_tower(*, is_tied: bool = False) -> PreTrainedModel:
    """Qwen3.5 with its image tower, as checkpoints have it: the causal class that is served is the text-only one."""
    text = RECURRENT["qwen3_5"]()
    text.tie_word_embeddings = is_tied
    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
    }
    config = Qwen3_5Config(text_config=text.to_dict(), vision_config=tower, tie_word_embeddings=is_tied)
    return random_model(config, model_class=AutoModelForImageTextToText)


def text_only(model: PreTrainedModel) -> PreTrainedModel:
    """The text-only class with the weights of a model that has an image tower."""
    alone = AutoModelForCausalLM.from_config(model.config.get_text_config(), attn_implementation="eager")
    alone.model.load_state_dict(model.model.language_model.state_dict())
    alone.lm_head.load_state_dict(model.lm_head.state_dict())
    return alone.eval()


def shallow_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    """The first two layers only, which cover everything between layers: for Triton's interpreter, which takes seconds
    per layer."""
    config = (CONFIGS | EXPERTS)[architecture]()
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return random_model(config, seed)


def tiny_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    return random_model(FAMILIES[architecture](), seed)


def random_model(
    config: PreTrainedConfig,
    seed: int = 0,
    model_class: type[AutoModelForCausalLM | AutoModelForImageTextToText | AutoModelForMultimodalLM] = (
        AutoModelForCausalLM
    ),
) -> PreTrainedModel:
    """float32, eval. Weights are larger than an initializer's, so that attention is sharp and logits spread."""
    torch.manual_seed(seed)
    model = model_class.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.dim() == 3 and name.endswith(
                "weight"
            ):  # a short convolution, before products of its outputs
                parameter.normal_(0, 0.7 / parameter.shape[-1] ** 0.5)
            elif name.endswith("A_log"):  # so that states last
                parameter.uniform_(-3, -0.5)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" in name:
                parameter.normal_(0, 0.2 if model.config.tie_word_embeddings else 1.0)
            else:
                parameter.normal_(0, 1.4 / parameter.shape[-1] ** 0.5)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes 0 to 255, then <bos>, <eos>, <pad>: 259 ids, one fewer than the model's logits."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert tokenizer.eos_token_id == EOS_TOKEN_ID
    return tokenizer


def save_tiny_model(architecture: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Save model and tokenizer where the engine can load them; returns the model."""
    model = tiny_model(architecture, seed)
    save_model(model, folder)
    return model


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Also saves the tokenizer alone, in a second folder: next to another family's config.json, AutoTokenizer would add
    that family's special tokens."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder / "tokenizer")

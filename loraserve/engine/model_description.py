"""Describes the model of a started engine. No torch here: the API process imports this module."""

from dataclasses import dataclass, field

from loraserve_adapters.base_layout import BaseLayout

from loraserve.engine.request import Pooling


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the API process must know about the model; it loads neither torch nor transformers itself."""

    name: str
    """Model path or name as given."""
    architecture: str
    dtype: str
    kv_cache_dtype: str
    device: str
    backend: str
    max_model_len: int
    vocab_size: int
    """Token ids at or above it do not exist for the tokenizer: they are refused, and their logits are masked."""
    hidden_size: int
    eos_token_ids: list[int]
    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]
    """bos_token, eos_token, pad_token, unk_token: for the chat template."""
    default_sampling: dict[str, float | int]
    """From generation_config: temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens if given."""
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    arena_size_bytes: int
    host_tier_bytes: int
    """Page-locked memory for adapters, in addition to the arena."""
    layout: BaseLayout
    default_pooling: Pooling | None = Pooling.LAST
    """As the model's own files specify; None = they specify something that the engine does not support."""
    is_headless: bool = False
    """It was saved without an `lm_head`: it can compute embeddings, but its logits mean nothing."""
    num_speculative_tokens: int = 0
    """Longest draft of an output's next tokens; 0 = no drafts."""
    quantization: str = "none"
    """Of the layers' weights, as in `EngineConfig`."""
    keeps_stored: bool = False
    """Whether weights that the checkpoint stores in four bits stay in four bits."""
    turn_end_ids: dict[str, int] = field(default_factory=dict)
    """Ids of `EngineConfig.turn_end_tokens`, by token."""
    notes: list[str] = field(default_factory=list)
    """What was chosen or lowered, for the person who started the server."""

    @property
    def weights(self) -> str:
        """The format of the layers' weights, in words: the quantized formats if there are any, else the dtype."""
        fewer = [] if self.quantization == "none" else [self.quantization]
        if self.keeps_stored:
            fewer.append("4 bits as stored")
        return ", ".join(fewer) or self.dtype

"""What an engine says of its model once it has started. No torch here: the API process imports this module."""

from dataclasses import dataclass, field

from loraserve_adapters.base_layout import BaseLayout

from loraserve.engine.request import Pooling


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the API process needs to know of the model; it loads neither torch nor transformers itself."""

    name: str
    """Model path or name as given."""
    architecture: str
    dtype: str
    kv_cache_dtype: str
    device: str
    backend: str
    max_model_len: int
    vocab_size: int
    """Token ids at or above it do not exist for the tokenizer: they are refused, and their logits masked."""
    hidden_size: int
    eos_token_ids: list[int]
    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]
    """bos_token, eos_token, pad_token, unk_token: for the chat template."""
    default_sampling: dict[str, float | int]
    """From generation_config: temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens where given."""
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    arena_size_bytes: int
    host_tier_bytes: int
    """Of page-locked memory for adapters beside the arena."""
    layout: BaseLayout
    default_pooling: Pooling | None = Pooling.LAST
    """What the model's own files say; None = what the engine does not have."""
    is_headless: bool = False
    """It was saved without an `lm_head`: it can embed, and its logits mean nothing."""
    num_speculative_tokens: int = 0
    """Longest draft of what a request's output goes on with; 0 = there are none."""
    quantization: str = "none"
    """Of its layers' weights, as `EngineConfig` has it."""
    keeps_stored: bool = False
    """Whether weights stay in four bits that the checkpoint has so."""
    turn_end_ids: dict[str, int] = field(default_factory=dict)
    """Ids of `EngineConfig.turn_end_tokens`, by the tokens."""
    notes: list[str] = field(default_factory=list)
    """What was chosen or lowered, for the person who started the server."""

    @property
    def weights(self) -> str:
        """The form of its layers' weights, in words: the dtype, or what has fewer bits."""
        fewer = [] if self.quantization == "none" else [self.quantization]
        if self.keeps_stored:
            fewer.append("4 bits as stored")
        return ", ".join(fewer) or self.dtype

"""LoRAX's and TGI's routes: POST /, /generate, /generate_stream and GET /info."""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from loraserve.api.schemas.structured_outputs import JsonObjectFormat
from loraserve.api.schemas.unsupported import ABSENT


class LoraxParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field names and meanings as in LoRAX."""

    adapter_id: str | None = None
    """An adapter's name. Left out: the base model."""
    adapter_source: str | None = None
    """Only "local" is accepted: adapters are uploaded to this server and found by name."""
    api_token: str | None = None
    """Refused: send the key in the Authorization header."""
    do_sample: bool = False
    """False (the default): greedy decoding, unless `temperature`, `top_k` or `top_p` is set."""
    max_new_tokens: int | None = None
    """At least 1. Default: as in the model's generation_config, else the rest of the context."""
    ignore_eos_token: bool = False
    """Continue after an end-of-sequence token. Default: false."""
    temperature: float | None = None
    """0 to 2; 0 = greedy. Default: 1 if sampling is on."""
    top_k: int | None = None
    """Default: off."""
    top_p: float | None = None
    """More than 0, at most 1. Default: 1."""
    repetition_penalty: float | None = None
    """0.01 to 10. Default: 1."""
    frequency_penalty: float | None = None
    """-2 to 2. Default: 0."""
    presence_penalty: float | None = None
    """-2 to 2. Default: 0."""
    seed: int | None = None
    """0 to 2^63 - 1. Default: random."""
    stop: list[str] = []
    """At most 16 strings of at most 256 characters. As in LoRAX, the text includes the stop string that ended it."""
    truncate: int | None = None
    """Keep only this many of the prompt's last tokens."""
    return_full_text: bool | None = None
    """Begin the text with the prompt. Default: false."""
    response_format: JsonObjectFormat | None = None
    """Constrains the text to a JSON schema."""
    details: bool = True
    """Include `details` in the answer. Default: true."""
    decoder_input_details: bool = False
    """Include the prompt's tokens in `details`, which must be true; not for streams. Default: false."""
    return_k_alternatives: int | None = None
    """Most likely alternatives to return for each token, 0 to 20. Default: none."""
    apply_chat_template: bool = False
    """Treat `inputs` as a user message and render it with the chat template. Default: false."""

    best_of: int | None = None
    """Only 1 is accepted."""
    merged_adapters: Raw = ABSENT
    typical_p: Raw = ABSENT
    watermark: Raw = ABSENT


class LoraxRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    inputs: str
    """The prompt."""
    parameters: LoraxParameters | None = None
    stream: bool = False
    """Stream the answer. Read by POST / only. Default: false."""


class PrefillToken(msgspec.Struct, frozen=True):
    """A token of the prompt."""

    id: int
    text: str
    logprob: float | None
    """Null for the first token."""


class AlternativeToken(msgspec.Struct, frozen=True):
    id: int
    text: str
    logprob: float


class LoraxToken(msgspec.Struct, frozen=True):
    id: int
    text: str
    logprob: float
    special: bool
    """Whether it is a special token."""
    skipped: bool = False
    alternative_tokens: list[AlternativeToken] | UnsetType = UNSET


class LoraxDetails(msgspec.Struct, frozen=True, kw_only=True):
    finish_reason: str
    """ "length", "eos_token" or "stop_sequence"."""
    prompt_tokens: int
    generated_tokens: int
    skipped_tokens: int = 0
    seed: int | None
    """The seed in use; null for greedy decoding."""
    prefill: list[PrefillToken]
    """The prompt's tokens, with `decoder_input_details`; else empty."""
    tokens: list[LoraxToken]


class LoraxResponse(msgspec.Struct, frozen=True):
    generated_text: str
    details: LoraxDetails | UnsetType = UNSET


class LoraxStreamDetails(msgspec.Struct, frozen=True, kw_only=True):
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    seed: int | None


class LoraxStreamEvent(msgspec.Struct, frozen=True):
    """One event per token."""

    token: LoraxToken
    generated_text: str | None
    """The whole text, on the last event; else null."""
    details: LoraxStreamDetails | None
    """On the last event; else null."""


class LoraxError(msgspec.Struct, frozen=True):
    error: str
    error_type: str
    """ "validation", "generation", "overloaded" or "incomplete_generation"."""


class LoraxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Server information in the form that clients of TGI and LoRAX read."""

    model_id: str
    model_sha: str | None
    """Fingerprint of the base model's layout."""
    model_dtype: str
    model_device_type: str
    max_concurrent_requests: int
    """Sequences that can run, plus those that may wait."""
    max_best_of: int = 1
    max_stop_sequences: int
    max_input_length: int
    """Tokens of a prompt: the context length minus one."""
    max_total_tokens: int
    """Context length in tokens."""
    max_batch_total_tokens: int
    """Most tokens that one step computes."""
    version: str
    request_logger_url: None = None

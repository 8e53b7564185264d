"""LoRAX's and TGI's routes: POST /, /generate, /generate_stream and GET /info."""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from loraserve.api.schemas.structured_outputs import JsonObjectFormat
from loraserve.api.schemas.unsupported import ABSENT


class LoraxParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names and meaning as in LoRAX."""

    adapter_id: str | None = None
    """An adapter's name; left out = the base model."""
    adapter_source: str | None = None
    """Only "local": adapters are uploaded to this server and found by name."""
    api_token: str | None = None
    """Refused: the Authorization header says who asks."""
    do_sample: bool = False
    """False: greedy, unless temperature, top_k or top_p is given."""
    max_new_tokens: int | None = None
    ignore_eos_token: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: list[str] = []
    """The text ends with the one that was met, as in LoRAX."""
    truncate: int | None = None
    """Keep this many of the prompt's last tokens."""
    return_full_text: bool | None = None
    """Begin the text with the prompt."""
    response_format: JsonObjectFormat | None = None
    """Holds the text to a JSON schema."""
    details: bool = True
    decoder_input_details: bool = False
    return_k_alternatives: int | None = None
    apply_chat_template: bool = False
    """Take `inputs` as a user's message."""

    best_of: int | None = None
    """Only 1."""
    merged_adapters: Raw = ABSENT
    typical_p: Raw = ABSENT
    watermark: Raw = ABSENT


class LoraxRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    inputs: str
    parameters: LoraxParameters | None = None
    stream: bool = False
    """Only read by POST /."""


class PrefillToken(msgspec.Struct, frozen=True):
    id: int
    text: str
    logprob: float | None


class AlternativeToken(msgspec.Struct, frozen=True):
    id: int
    text: str
    logprob: float


class LoraxToken(msgspec.Struct, frozen=True):
    id: int
    text: str
    logprob: float
    special: bool
    skipped: bool = False
    alternative_tokens: list[AlternativeToken] | UnsetType = UNSET


class LoraxDetails(msgspec.Struct, frozen=True, kw_only=True):
    finish_reason: str
    """ "length", "eos_token" or "stop_sequence"."""
    prompt_tokens: int
    generated_tokens: int
    skipped_tokens: int = 0
    seed: int | None
    prefill: list[PrefillToken]
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
    """One per token."""

    token: LoraxToken
    generated_text: str | None
    """All of it, on the last event."""
    details: LoraxStreamDetails | None
    """On the last event."""


class LoraxError(msgspec.Struct, frozen=True):
    error: str
    error_type: str
    """ "validation", "generation", "overloaded" or "incomplete_generation"."""


class LoraxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What TGI's and LoRAX's clients read."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: str
    max_concurrent_requests: int
    max_best_of: int = 1
    max_stop_sequences: int
    max_input_length: int
    max_total_tokens: int
    max_batch_total_tokens: int
    version: str
    request_logger_url: None = None

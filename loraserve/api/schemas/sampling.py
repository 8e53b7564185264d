"""Request fields that completions, chats and responses share."""

from typing import Any

import msgspec
from msgspec import Raw

from loraserve.api.schemas.structured_outputs import ResponseFormat, StructuredOutputs
from loraserve.api.schemas.unsupported import ABSENT, UnsupportedEverywhere


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    """A last chunk with `usage` and no choices."""
    continuous_usage_stats: bool = False
    """`usage` so far in every chunk."""
    include_obfuscation: bool | None = None
    """Accepted; we never pad chunks."""


class SamplingFields(UnsupportedEverywhere, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names and meaning as in OpenAI's APIs and vLLM's extensions of them."""

    model: str | None = None
    """The base model's name or an adapter's: `name`, `name@v3`, `name@alias`, each also as `base:name`."""
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    """Holds the answer to a JSON schema, a regular expression, a choice of texts or a grammar."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of the prompt's last tokens; -1 = as many as fit beside the longest answer, or
    beside one token where it has no limit."""
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    """Prefixes are shared only with requests of the same salt."""
    priority: int | None = None
    """Only 0."""
    request_id: str | None = None
    user: str | None = None
    """Whom a canary of an adapter sticks to, unless `safety_identifier` is given."""
    safety_identifier: str | None = None

    # Harmless: accepted, and without effect.
    prompt_cache_key: str | None = None
    store: bool | None = None
    """Only false."""
    service_tier: str | None = None
    """Only "auto" or "default"."""


class GenerationFields(SamplingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of completions and chats."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    """Holds the answer to JSON, or to a JSON schema. It does not say so to the model: the prompt should."""
    guided_choice: list[str] | None = None
    """vLLM's older name for `structured_outputs.choice`."""
    guided_grammar: str | None = None
    """vLLM's older name for `structured_outputs.grammar`."""
    guided_json: dict[str, Any] | str | None = None
    """vLLM's older name for `structured_outputs.json`."""
    guided_regex: str | None = None
    """vLLM's older name for `structured_outputs.regex`."""
    guided_whitespace_pattern: str | None = None
    """vLLM's older name for `structured_outputs.whitespace_pattern`."""
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens of logprobs read "token_id:<id>"."""
    include_metrics: bool = False
    """Add `metrics` to the response, or to the last chunk of a stream."""

    # Harmless: accepted, and without effect.
    metadata: Raw = ABSENT

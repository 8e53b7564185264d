"""Request fields shared by completions, chats, responses and messages."""

from typing import Any

import msgspec
from msgspec import Raw

from loraserve.api.schemas.structured_outputs import ResponseFormat, StructuredOutputs
from loraserve.api.schemas.unsupported import ABSENT, UnsupportedEverywhere


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Only accepted with `stream`."""

    include_usage: bool = False
    """End the stream with a chunk that has `usage` and no choices. Default: false."""
    continuous_usage_stats: bool = False
    """Include the `usage` so far in every chunk. Default: false."""
    include_obfuscation: bool | None = None
    """Without effect: chunks are never padded."""


class SamplingFields(UnsupportedEverywhere, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field names and meanings as in OpenAI's APIs and vLLM's extensions of them."""

    model: str | None = None
    """The base model's name, or an adapter's: `name`, `name@v3` or `name@alias`, optionally prefixed with the base
    model's name: `base:name`. On a route below /adapters/{adapter} it may be left out."""
    stream: bool | None = None
    """Return the answer as server-sent events. Default: false."""
    temperature: float | None = None
    """0 to 2; 0 (or less than 0.00001) = greedy decoding. Other values below 0.01 count as 0.01. Default: as in the
    model's generation_config, else 1."""
    top_p: float | None = None
    """More than 0, at most 1. Default: as in the model's generation_config, else 1 (off)."""
    top_k: int | None = None
    """0 or -1 = off. Default: as in the model's generation_config, else 0."""
    min_p: float | None = None
    """0 to 1. Default: as in the model's generation_config, else 0 (off)."""
    presence_penalty: float | None = None
    """-2 to 2. Default: 0."""
    frequency_penalty: float | None = None
    """-2 to 2. Default: 0."""
    repetition_penalty: float | None = None
    """0.01 to 10. Default: as in the model's generation_config, else 1 (off)."""
    logit_bias: dict[str, float] | None = None
    """Numbers from -100 to 100, by token id, that are added to the logits of at most 300 tokens."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be generated. Default: all."""
    seed: int | None = None
    """A 64-bit integer. Default, and -1: random."""
    stop: str | list[str] | None = None
    """At most 16 strings of at most 256 characters; the answer ends before the first that appears."""
    stop_token_ids: list[int] | None = None
    """At most 1,024 token ids that end the answer."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text. Default: false."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token. Default: false."""
    min_tokens: int | None = None
    """Tokens before which neither an end-of-sequence token nor `stop` or `stop_token_ids` ends the answer. Default:
    0."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text. Default: true."""
    structured_outputs: StructuredOutputs | None = None
    """Constrains the answer to a JSON schema, a regular expression, one of several texts or a grammar."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's last tokens. -1 = as many as leave room for the longest answer allowed, or
    for one token if the answer has no limit. Default: longer prompts are refused."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as BOS, to the prompt. Default: true for completions; false where a chat
    template renders the prompt."""
    cache_salt: str | None = None
    """Cached prefixes are shared only between requests with the same salt. 1 to 256 characters."""
    priority: int | None = None
    """Among the tenant's requests, those with lower numbers go first and may interrupt others. Default: 0."""
    service_tier: str | None = None
    """In place of `priority`: "flex" is 1, "priority" is -1, and "auto" and "default" are 0."""
    request_id: str | None = None
    """Used in the answer's id instead of x-request-id: 1 to 128 letters, digits, '.', '_', ':' or '-'."""
    user: str | None = None
    """Identifies the end user, so that an adapter's canary gives the same user the same version each time.
    `safety_identifier` takes precedence."""
    safety_identifier: str | None = None
    """Identifies the end user, like `user`."""

    # Harmless: accepted, and without effect.
    prompt_cache_key: str | None = None
    """Without effect."""
    store: bool | None = None
    """Only false is accepted."""


class GenerationFields(SamplingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields shared by completions and chats."""

    n: int | None = None
    """Choices for each prompt, 1 to 8. Default: 1."""
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    """Most tokens of each choice, at least 1; for completions with `echo` also 0. Default: 16 for completions. For
    chats it is the former name of `max_completion_tokens`."""
    response_format: ResponseFormat | None = None
    """Constrains the answer to JSON or to a JSON schema. The model is not told about it: describe it in the prompt."""
    guided_choice: list[str] | None = None
    """vLLM's former name for `structured_outputs.choice`."""
    guided_grammar: str | None = None
    """vLLM's former name for `structured_outputs.grammar`."""
    guided_json: dict[str, Any] | str | None = None
    """vLLM's former name for `structured_outputs.json`."""
    guided_regex: str | None = None
    """vLLM's former name for `structured_outputs.regex`."""
    guided_whitespace_pattern: str | None = None
    """vLLM's former name for `structured_outputs.whitespace_pattern`."""
    prompt_logprobs: int | None = None
    """Most likely alternatives to return for each prompt token, 0 to 20; not with `stream`. Default: no
    log-probabilities."""
    return_token_ids: bool | None = None
    """Include the token ids of prompts and choices. Default: false."""
    return_tokens_as_token_ids: bool | None = None
    """Write the tokens of log-probabilities as "token_id:<id>". Default: false."""
    include_metrics: bool = False
    """Add `metrics` to the response, or to the last chunk of a stream. Default: false."""

    # Harmless: accepted, and without effect.
    metadata: Raw = ABSENT

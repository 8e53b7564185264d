"""/v1/completions."""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from loraserve.api.schemas.logprobs import PromptLogprobs
from loraserve.api.schemas.metrics import RequestMetrics
from loraserve.api.schemas.sampling import GenerationFields
from loraserve.api.schemas.unsupported import ABSENT
from loraserve.api.schemas.usage import Usage


class CompletionRequest(GenerationFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field names and meanings as in OpenAI's API and vLLM's extensions of it."""

    prompt: str | list[str | int | list[int]]
    """A text, up to 64 texts, token ids, or up to 64 lists of token ids."""
    echo: bool | None = None
    """Begin the text with the prompt. Default: false."""
    logprobs: int | None = None
    """Number of most likely alternatives to return for each token, 0 to 20. Default: no log-probabilities."""
    best_of: int | None = None
    """Only a value equal to `n` is accepted."""
    suffix: Raw = ABSENT


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Columns with one entry per token."""

    text_offset: list[int]
    """Where each token begins in the choice's text, in characters."""
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens with their log-probabilities; null for the first token of an echoed prompt."""


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    """Choices of the first prompt come first: `prompt index * n + choice`."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    """ "stop", "length" or "abort"; null in a stream until the choice ends."""
    stop_reason: str | int | None
    """The stop string or stop token id that ended the text; null otherwise."""
    token_ids: list[int] | UnsetType = UNSET
    """Only with `return_token_ids`."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Only with `return_token_ids`."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Only with `prompt_logprobs`."""


class CompletionResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    """Unix seconds."""
    model: str
    """The model as the request named it."""
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: RequestMetrics | UnsetType = UNSET
    """Only with `include_metrics`."""

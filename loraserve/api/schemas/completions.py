"""/v1/completions."""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from loraserve.api.schemas.logprobs import PromptLogprobs
from loraserve.api.schemas.metrics import RequestMetrics
from loraserve.api.schemas.sampling import GenerationFields
from loraserve.api.schemas.unsupported import ABSENT
from loraserve.api.schemas.usage import Usage


class CompletionRequest(GenerationFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    """A text, several texts, token ids, or several lists of token ids."""
    echo: bool | None = None
    """Begin the text with the prompt."""
    logprobs: int | None = None
    best_of: int | None = None
    """Only equal to `n`."""
    suffix: Raw = ABSENT


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: RequestMetrics | UnsetType = UNSET
    """Only if asked for with `include_metrics`."""

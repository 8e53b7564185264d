"""Token counts of a response."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.serving.generation import TokenUsage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | UnsetType = UNSET
    """Only on a server that separates reasoning (--reasoning-parser)."""
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Only with `prediction`: drafted tokens of it that the model also chose, several in one step."""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """Drafted tokens that the model did not choose; they are not part of the completion."""


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    """Tokens of all choices, reasoning included."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage_of(usage: TokenUsage) -> Usage:
    return Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.num_cached_tokens),
        completion_tokens_details=_completion_details(usage),
    )


def _completion_details(usage: TokenUsage) -> CompletionTokensDetails | UnsetType:
    num_reasoning_tokens, prediction = usage.num_reasoning_tokens, usage.prediction
    if num_reasoning_tokens is None and prediction is None:
        return UNSET
    return CompletionTokensDetails(
        UNSET if num_reasoning_tokens is None else num_reasoning_tokens,
        UNSET if prediction is None else prediction.num_accepted_tokens,
        UNSET if prediction is None else prediction.num_rejected_tokens,
    )

"""Token counts of a response."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.serving.generation import PredictionUsage, TokenUsage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Of a request with `prediction`."""

    accepted_prediction_tokens: int
    """Drafted tokens that the model chose too, several in one step."""
    rejected_prediction_tokens: int
    """They are no part of the completion."""


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage_of(usage: TokenUsage) -> Usage:
    return Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.num_cached_tokens),
        completion_tokens_details=_completion_details(usage.prediction),
    )


def _completion_details(prediction: PredictionUsage | None) -> CompletionTokensDetails | UnsetType:
    if prediction is None:
        return UNSET
    return CompletionTokensDetails(prediction.num_accepted_tokens, prediction.num_rejected_tokens)

"""vLLM's `prompt_logprobs`: for each prompt token but the first, log-probabilities by token id."""

import msgspec


class PromptTokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one token at one position of the prompt."""

    logprob: float
    rank: int
    """1 = the most likely token at this position."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]

"""vLLM's `prompt_logprobs`: for each prompt token but the first, logprobs by token id."""

import msgspec


class PromptTokenLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]

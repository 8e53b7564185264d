"""From a request's prompts to token ids."""

from typing import cast

from loraserve.api.http.ranges import check_at_most, check_token_ids
from loraserve.serving.errors import invalid_value
from loraserve.serving.settings import RequestLimits


def split_prompts(
    param: str, prompt: str | list[str | int | list[int]], limit: int, vocab_size: int
) -> list[str | list[int]]:
    """Turns the four forms of OpenAI's `prompt` and `input` into a list of texts or of lists of checked token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid_value(param, "is empty.")
    # There may be a million ids: one pass in C, without a copy.
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise invalid_value(param, "mixes texts and token ids.")
    prompts = cast(list[str | list[int]], [prompt] if kinds == {int} else prompt)
    check_at_most(param, len(prompts), limit, f"{param}s")
    for token_ids in prompts:
        if isinstance(token_ids, list):
            check_token_ids(param, token_ids, vocab_size)
    return prompts


def prompt_bytes(prompt: str | list[int]) -> int:
    """Approximate size before tokenization; four bytes per token id."""
    return len(prompt) if isinstance(prompt, str) else 4 * len(prompt)


def truncate(
    token_ids: list[int],
    limit: int | None,
    max_model_len: int,
    max_tokens: int | None,
    param: str = "truncate_prompt_tokens",
) -> list[int]:
    """The last `limit` tokens. -1 = as many as fit with `max_tokens` of answer, or one token of it if that is None."""
    if limit is None:
        return token_ids
    if limit != -1 and not 1 <= limit <= max_model_len:
        raise invalid_value(param, f"is {limit}; it must be -1 or between 1 and {max_model_len}.")
    if limit == -1:
        limit = max(1, max_model_len - (max_tokens or 1))
    return token_ids[-limit:]


def truncate_around(token_ids: list[int], bare: list[int], limit: int) -> list[int]:
    """Cuts a text at its end, but keeps all tokens that the tokenizer put around it. bare: the text without them."""
    num_added = len(token_ids) - len(bare)
    for start in range(num_added + 1):
        end = start + len(bare)
        if token_ids[start:end] == bare and num_added < limit:
            return token_ids[:start] + bare[: limit - num_added] + token_ids[end:]
    return token_ids[:limit]


def check_not_empty(param: str, token_ids: list[int]) -> None:
    if not token_ids:
        raise invalid_value(param, "has no tokens.")


def check_prompt_logprobs(param: str, num_tokens: int, num_answered: int, top: int, limits: RequestLimits) -> None:
    """Nothing else bounds what a short request can ask for. num_answered: how often the response has the values."""
    count = num_tokens * num_answered * (top + 1)
    if count > limits.max_prompt_logprobs:
        raise invalid_value(
            param,
            f"would return {count} log-probabilities for the prompts' tokens; the limit is "
            f"{limits.max_prompt_logprobs}. Send fewer prompts at once, or request fewer choices or log-probabilities.",
        )

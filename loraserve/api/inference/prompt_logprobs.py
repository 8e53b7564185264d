"""vLLM's prompt_logprobs."""

from loraserve.api.inference.token_names import finite
from loraserve.api.schemas.logprobs import PromptLogprobs, PromptTokenLogprob
from loraserve.engine.request import TokenLogprob
from loraserve.serving.text.token_text import TokenText


def prompt_logprobs(tokens: list[TokenLogprob | None] | None, count: int, token_text: TokenText) -> PromptLogprobs:
    return [None if token is None else _entry(token, count, token_text) for token in tokens or []]


def _entry(token: TokenLogprob, count: int, token_text: TokenText) -> dict[str, PromptTokenLogprob]:
    entry = {
        str(token_id): PromptTokenLogprob(finite(logprob), rank, token_text.text_of(token_id))
        for rank, (token_id, logprob) in enumerate(token.top[:count], start=1)
    }
    own = PromptTokenLogprob(finite(token.logprob), token.rank, token_text.text_of(token.token_id))
    return entry | {str(token.token_id): own}

"""Names of tokens in logprobs."""

from loraserve.engine.request import TokenLogprob
from loraserve.serving.text.token_text import TokenText

LOWEST_LOGPROB = -9999.0
"""vLLM's substitute for minus infinity, which JSON lacks."""


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


class TokenNames:
    """as_ids: tokens are named "token_id:<id>", for clients that need exact ids."""

    def __init__(self, token_text: TokenText, as_ids: bool) -> None:
        self._token_text = token_text
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._token_text.text_of(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        return [*self._token_text.bytes_of(token_id)]

    def top(self, token: TokenLogprob, count: int) -> dict[str, float]:
        """The `count` most likely tokens and the sampled one, in the format of completions."""
        top = {self.name(token_id): finite(logprob) for token_id, logprob in token.top[:count]}
        return top | {self.name(token.token_id): finite(token.logprob)}

"""Log-probabilities of an answer's tokens, in the format of chats and responses."""

from collections.abc import Iterable

from loraserve.api.inference.token_names import TokenNames, finite
from loraserve.api.schemas.chat import ContentLogprob, TopLogprob
from loraserve.engine.request import TokenLogprob


def content_logprobs(names: TokenNames, tokens: Iterable[TokenLogprob], count: int) -> list[ContentLogprob]:
    """count: number of most likely tokens per position."""
    return [
        ContentLogprob(
            token=names.name(token.token_id),
            logprob=finite(token.logprob),
            bytes=names.bytes_of(token.token_id),
            top_logprobs=[
                TopLogprob(names.name(token_id), finite(logprob), names.bytes_of(token_id))
                for token_id, logprob in token.top[:count]
            ],
        )
        for token in tokens
    ]

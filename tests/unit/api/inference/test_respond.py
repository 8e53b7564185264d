"""How much is written down on the event loop."""

from loraserve.api.inference.respond import size_of
from loraserve.engine.request import TokenLogprob
from loraserve.serving.choice import ChoiceDelta
from loraserve.serving.tokenizer import INLINE_SIZE


def delta(num_tokens: int, num_alternatives: int | None = None) -> ChoiceDelta:
    top = [(1, -1.0)] * (num_alternatives or 0)
    logprobs = [] if num_alternatives is None else [TokenLogprob(1, -1.0, 1, top)] * num_tokens
    return ChoiceDelta(0, 0, token_ids=[1] * num_tokens, logprobs=logprobs)


def test_alternatives_count_as_tokens_do() -> None:
    assert size_of([delta(3), delta(2)]) == 5
    assert size_of([delta(10, 0)]) == 20
    assert size_of([delta(10, 20)]) == 220


def test_a_step_of_a_stream_is_written_at_once_a_long_answer_is_not() -> None:
    assert size_of([delta(1, 20)] * 8) < INLINE_SIZE < size_of([delta(4000, 20)])

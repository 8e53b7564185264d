"""Decides which token is a sequence's last."""

from loraserve.engine.request import FinishReason
from loraserve.engine.scheduling.sequence import Sequence


class Endings:
    """What ends a sequence by itself: its stop tokens, the model's EOS, its own maximum length and the model's."""

    def __init__(self, eos_token_ids: tuple[int, ...], max_model_len: int) -> None:
        self._eos = eos_token_ids
        self._max_model_len = max_model_len

    def reason(self, sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        """(Why `token_id`, the sequence's newest token, ends it; which of its `stop_token_ids` did). None = it does
        not."""
        params = sequence.request.sampling
        num_tokens = len(sequence.token_ids)
        num_output_tokens = num_tokens - sequence.num_prompt_tokens
        if num_output_tokens >= params.min_tokens:
            if token_id in params.stop_token_ids:
                return FinishReason.STOP, token_id
            if token_id in self._eos and not params.ignore_eos:
                return FinishReason.STOP, None
        if num_output_tokens >= params.max_tokens or num_tokens >= self._max_model_len:
            return FinishReason.LENGTH, None
        return None, None

    def num_left(self, sequence: Sequence) -> int:
        """Tokens left until a length limit ends it; 0 for a pooled sequence, which ends with its prompt."""
        if sequence.is_pooled:
            return 0
        params = sequence.request.sampling
        return min(params.max_tokens - sequence.num_output_tokens, self._max_model_len - sequence.num_tokens)

    def ends_with_next(self, sequence: Sequence) -> bool:
        """Whether its next token is the last one, whichever token it is."""
        return self.num_left(sequence) <= 1

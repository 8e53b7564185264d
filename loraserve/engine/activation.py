"""Where an activated LoRA (aLoRA, https://huggingface.co/papers/2504.12397) begins in a prompt."""

from collections.abc import Sequence


def last_invocation(prompt_token_ids: Sequence[int], invocation_token_ids: Sequence[int]) -> int | None:
    """Start of the last complete occurrence of the invocation, as PEFT's `calculate_alora_offsets`; None if absent.

    invocation_token_ids: at least one.
    """
    first, length, wanted = invocation_token_ids[0], len(invocation_token_ids), list(invocation_token_ids)
    for start in range(len(prompt_token_ids) - length, -1, -1):
        if prompt_token_ids[start] == first and list(prompt_token_ids[start : start + length]) == wanted:
            return start
    return None

"""Activated LoRA: a prompt must contain the adapter's invocation, or the answer would be the base model's."""

from collections.abc import Sequence

from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.engine.activation import last_invocation
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.generation import Prompt
from loraserve.serving.text.tokenizer import TextTokenizer


async def check_activated(adapter: ResolvedAdapter, prompts: Sequence[Prompt], tokenizer: TextTokenizer) -> None:
    """Raises `ServingError` if the adapter is an activated LoRA that would not affect the answer to every prompt."""
    invocation = adapter.invocation_token_ids
    if not invocation:
        return

    def has_all() -> bool:
        return all(last_invocation(prompt.token_ids, invocation) is not None for prompt in prompts)

    if not await tokenizer.run(sum(len(prompt.token_ids) for prompt in prompts), has_all):
        message = (
            f"The adapter '{adapter.name}' (version {adapter.version}) is an activated LoRA that takes effect from "
            f"{tokenizer.decode_few(invocation)!r} on (token ids "
            f"{list(invocation)}), but the prompt does not contain it. Put it where the adapter's answer should begin."
        )
        raise ServingError(ErrorCode.ADAPTER_NOT_ACTIVATED, message)

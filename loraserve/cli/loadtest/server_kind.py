"""Which server is measured, as far as its requests differ from OpenAI's."""

from enum import StrEnum


class ServerKind(StrEnum):
    LORASERVE = "loraserve"
    VLLM = "vllm"
    SGLANG = "sglang"
    LORAX = "lorax"
    OPENAI = "openai"
    """Anything else: only OpenAI's own fields."""

    @property
    def takes_token_ids(self) -> bool:
        """LoRAX takes one text."""
        return self is not ServerKind.LORAX

    @property
    def can_ignore_eos(self) -> bool:
        return self is not ServerKind.OPENAI

"""Kinds of servers whose requests differ."""

from enum import StrEnum


class ServerKind(StrEnum):
    LORASERVE = "loraserve"
    VLLM = "vllm"
    SGLANG = "sglang"
    LORAX = "lorax"
    OPENAI = "openai"
    """Any other server: only OpenAI's own fields are sent."""

    @property
    def takes_token_ids(self) -> bool:
        """LoRAX accepts only text."""
        return self is not ServerKind.LORAX

    @property
    def can_ignore_eos(self) -> bool:
        return self is not ServerKind.OPENAI

"""/tokenize and /detokenize."""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from loraserve.api.schemas.chat import RequestMessage
from loraserve.api.schemas.tools import Tool
from loraserve.api.schemas.unsupported import ABSENT


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[RequestMessage] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Raw] | None = None
    tools: list[Tool] | None = None
    chat_template: Raw = ABSENT
    mm_processor_kwargs: Raw = ABSENT


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | UnsetType | None = UNSET


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str

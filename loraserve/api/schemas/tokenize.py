"""/tokenize and /detokenize."""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from loraserve.api.schemas.chat import RequestMessage
from loraserve.api.schemas.tools import Tool
from loraserve.api.schemas.unsupported import ABSENT


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `prompt` and `messages`."""

    model: str | None = None
    """Default: the base model. Only `messages` depend on it, through the adapter's chat template."""
    prompt: str | None = None
    messages: list[RequestMessage] | None = None
    """As in ChatCompletionRequest, like the fields below."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as BOS. Default: true for `prompt`, false for `messages`."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None
    """Include `token_strs`. Default: false."""
    chat_template_kwargs: dict[str, Raw] | None = None
    tools: list[Tool] | None = None
    chat_template: Raw = ABSENT
    mm_processor_kwargs: Raw = ABSENT


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    """Number of tokens."""
    max_model_len: int
    """The model's context length in tokens."""
    tokens: list[int]
    token_strs: list[str | None] | UnsetType | None = UNSET
    """The tokens as written in the vocabulary; only with `return_token_strs`."""


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str

"""Fields that clients know and we cannot honour: refused by name, except where their value asks for nothing."""

from typing import Any

import msgspec
from msgspec import Raw

from loraserve.serving.errors import ErrorCode, ServingError

ABSENT: Any = msgspec.field(default_factory=Raw)
"""No bytes at all: the field was not sent. A factory, because OpenAPI documents show defaults."""
MAX_NEUTRAL_BYTES = 64
"""No neutral value is longer: what is longer is not even looked into."""

NEUTRAL_VALUES: dict[str, tuple[bytes, ...]] = {
    "audio": (),
    "best_of": (b"1",),
    "chat_template": (),
    "disable_additional_properties": (b"false",),
    "documents": (b"[]",),
    "early_stopping": (b"false",),
    "echo": (b"false",),
    "function_call": (b'"none"', b'"auto"'),
    "functions": (b"[]",),
    "guided_decoding_backend": (),
    "bad_words": (b"[]",),
    "include_reasoning": (b"true",),
    "kv_transfer_params": (b"{}",),
    "length_penalty": (b"1", b"1.0"),
    "logits_processors": (b"[]",),
    "mm_processor_kwargs": (b"{}",),
    "modalities": (b'["text"]',),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (b'"none"',),
    "spaces_between_special_tokens": (b"true",),
    "structural_tag": (),
    "suffix": (),
    "use_beam_search": (b"false",),
    "verbosity": (),
    "vllm_xargs": (b"{}",),
    "web_search_options": (),
    # Of LoRAX.
    "merged_adapters": (),
    "typical_p": (b"1", b"1.0"),
    "watermark": (b"false",),
    # Of messages.
    "annotations": (b"[]",),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
}
"""JSON values, without spaces, that ask for nothing; null is always one of them."""


class UnsupportedEverywhere(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of completions and chat."""

    guided_decoding_backend: Raw = ABSENT
    bad_words: Raw = ABSENT
    early_stopping: Raw = ABSENT
    kv_transfer_params: Raw = ABSENT
    length_penalty: Raw = ABSENT
    logits_processors: Raw = ABSENT
    spaces_between_special_tokens: Raw = ABSENT
    use_beam_search: Raw = ABSENT
    vllm_xargs: Raw = ABSENT


def refuse_unsupported(struct: msgspec.Struct, path: str = "") -> None:
    """Raises `ServingError` naming the first field that asks for something we do not do."""
    for field in struct.__struct_fields__:
        value = getattr(struct, field)
        if isinstance(value, Raw) and field in NEUTRAL_VALUES and not _is_neutral(field, value):
            message = f"'{path}{field}' is not supported by this server. Leave it out."
            raise ServingError(ErrorCode.UNSUPPORTED_PARAMETER, message, param=path + field)


def _is_neutral(field: str, value: Raw) -> bool:
    data = bytes(value)
    if data in (b"", b"null"):
        return True
    if len(data) > MAX_NEUTRAL_BYTES:
        return False
    return _compact(data) in NEUTRAL_VALUES[field]


def _compact(data: bytes) -> bytes:
    return msgspec.json.format(data, indent=-1)

"""Fields that clients know but this server does not support: refused by name, unless their value has no effect."""

from typing import Any

import msgspec
from msgspec import Raw

from loraserve.serving.errors import ErrorCode, ServingError

ABSENT: Any = msgspec.field(default_factory=Raw)
"""No bytes at all: the field was not sent. A factory, because a plain default would appear in the OpenAPI document."""
MAX_NEUTRAL_BYTES = 128
"""Longer than every neutral value; anything longer is refused without being examined."""

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
    "guided_decoding_backend": (b'"auto"', b'"guidance"'),
    "bad_words": (b"[]",),
    "kv_transfer_params": (b"{}",),
    "length_penalty": (b"1", b"1.0"),
    "logits_processors": (b"[]",),
    "mm_processor_kwargs": (b"{}",),
    "modalities": (b'["text"]',),
    "moderation": (),
    "prompt_cache_retention": (),
    "spaces_between_special_tokens": (b"true",),
    "structural_tag": (),
    "suffix": (),
    "use_beam_search": (b"false",),
    "verbosity": (b'"medium"',),
    "vllm_xargs": (b"{}",),
    "web_search_options": (),
    # Responses.
    "background": (b"false",),
    "caller": (b'{"type":"direct"}',),
    "context_management": (
        b"[]",
        b'{"edits":[]}',
        b'{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]}',
    ),
    "conversation": (),
    "defer_loading": (b"false",),
    "encrypted_content": (),
    "generate_summary": (),
    "max_tool_calls": (),
    "namespace": (),
    "phase": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": (),
    "summary": (b'"auto"',),
    "truncation": (b'"disabled"',),
    # LoRAX.
    "merged_adapters": (),
    "typical_p": (b"1", b"1.0"),
    "watermark": (b"false",),
    # Embeddings and classifiers.
    "messages": (),
    # Rerankers.
    "max_chunks_per_doc": (),
    "rank_fields": (b'["text"]',),
    # A chat's messages.
    "annotations": (b"[]",),
    "refusal": (),
    # Anthropic's Messages API.
    "allowed_callers": (b'["direct"]',),
    "citations": (b"[]",),
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
    "input_examples": (b"[]",),
    "mcp_servers": (b"[]",),
    "speed": (b'"standard"',),
    "task_budget": (),
    "thread": (),
    "toolset_name": (),
}
"""For each field, the JSON values without whitespace that have no effect; null is always one of them."""


LEAVE_IT_OUT = "Leave it out."
NOT_STORED = "Earlier requests are not stored: send their items with 'input'."

REMEDIES = {
    "background": "Answers are not stored: a request has to wait for its answer. Leave it out.",
    "conversation": NOT_STORED,
    "mcp_servers": "This server has no tools of its own. Leave it out.",
    "messages": "Send their text with 'input'.",
    "max_tool_calls": "It limits calls of a server's own tools, and this server has none. Leave it out.",
    "previous_response_id": NOT_STORED,
    "prompt": "Prompts are not stored: send 'instructions' and 'input'.",
    "thread": "Earlier requests are not stored: send the messages so far.",
    "truncation": "Send 'truncate_prompt_tokens': -1 to keep the last tokens that fit.",
}
"""For fields where there is better advice than to leave them out."""


class UnsupportedEverywhere(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of completions, chats, responses and messages."""

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
    """Raises `ServingError` for the first field whose value requests an unsupported feature."""
    for field in struct.__struct_fields__:
        value = getattr(struct, field)
        if isinstance(value, Raw) and field in NEUTRAL_VALUES and not _is_neutral(field, value):
            message = f"'{path}{field}' is not supported by this server. {REMEDIES.get(field, LEAVE_IT_OUT)}"
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

"""What /v1/embeddings and /v1/classify share."""

import msgspec

from loraserve.api.schemas.unsupported import ABSENT


class InputFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names and meaning as in OpenAI's API and vLLM's extensions of it."""

    input: str | list[str | int | list[int]]
    """A text, several texts, token ids, or several lists of token ids."""
    model: str | None = None
    """The base model's name or an adapter's: `name`, `name@v3`, `name@alias`, each also as `base:name`."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of an input's tokens: the first ones, and what the tokenizer puts around a text; -1 = as many as
    the model takes."""
    add_special_tokens: bool | None = None
    """Default: true."""
    cache_salt: str | None = None
    """Prefixes are shared only with requests of the same salt."""
    priority: int | None = None
    """Only 0."""
    user: str | None = None
    """Whom a canary of an adapter sticks to."""
    messages: msgspec.Raw = ABSENT

"""What requests share that are answered by vectors, labels or scores."""

import msgspec

from loraserve.api.schemas.unsupported import ABSENT


class PooledFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names and meaning as in OpenAI's API and vLLM's extensions of it."""

    model: str | None = None
    """The base model's name or an adapter's: `name`, `name@v3`, `name@alias`, each also as `base:name`."""
    add_special_tokens: bool | None = None
    """Default: true."""
    cache_salt: str | None = None
    """Prefixes are shared only with requests of the same salt."""
    priority: int | None = None
    """Only 0."""
    user: str | None = None
    """Whom a canary of an adapter sticks to."""


class InputFields(PooledFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of embeddings and labels."""

    input: str | list[str | int | list[int]]
    """A text, several texts, token ids, or several lists of token ids."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of an input's tokens: the first ones, and what the tokenizer puts around a text; -1 = as many as
    the model takes."""
    messages: msgspec.Raw = ABSENT


class PairFields(PooledFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of what a document is worth to a query."""

    truncate_prompt_tokens: int | None = None
    """Shorten documents so that each has at most this many tokens together with its query and what is put around them;
    -1 = as many as the model takes."""
    max_tokens_per_doc: int | None = None
    """Keep this many of a document's tokens, the first ones, and fewer where the model takes no more."""
    use_activation: bool | None = None
    """False = the numbers that the adapter's head gives. Default: true, probabilities, unless its problem_type is
    "regression"."""

"""Fields shared by requests whose answers are vectors, labels or scores."""

import msgspec

from loraserve.api.schemas.unsupported import ABSENT


class PooledFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field names and meanings as in OpenAI's API and vLLM's extensions of it."""

    model: str | None = None
    """The base model's name, or an adapter's: `name`, `name@v3` or `name@alias`, optionally prefixed with the base
    model's name: `base:name`."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as BOS, to texts. Default: true."""
    cache_salt: str | None = None
    """Cached prefixes are shared only between requests with the same salt. 1 to 256 characters."""
    priority: int | None = None
    """Among the tenant's requests, those with lower numbers go first and may interrupt others. Default: 0."""
    user: str | None = None
    """Identifies the end user, so that an adapter's canary gives the same user the same version each time."""


class InputFields(PooledFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields shared by embeddings and classification."""

    input: str | list[str | int | list[int]]
    """A text, up to 2,048 texts, token ids, or up to 2,048 lists of token ids."""
    truncate_prompt_tokens: int | None = None
    """Keep at most this many tokens of each input: the first ones, and everything that the tokenizer adds around a
    text. 1 to the model's context length; -1 = the context length. Default: longer inputs are refused."""
    messages: msgspec.Raw = ABSENT


class PairFields(PooledFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields shared by reranking and scoring."""

    truncate_prompt_tokens: int | None = None
    """Shorten each document so that it, its query and everything added around them have at most this many tokens. 1 to
    the model's context length; -1 = the context length. Default: longer documents are refused, unless
    `max_tokens_per_doc` is set."""
    max_tokens_per_doc: int | None = None
    """Keep only the first tokens of each document, at most this many, or fewer if the model's context has no room for
    them."""
    use_activation: bool | None = None
    """True: return probabilities (sigmoid), unless the adapter's problem_type is "regression". False: return the head's
    numbers. Default: true."""

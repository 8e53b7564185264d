"""/v1/adapters/{name}/versions."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.store.records import Tier


class InvocationItem(msgspec.Struct, frozen=True):
    """What activates an activated LoRA: it counts from the last place of a prompt on where these tokens are, and a
    prompt without them is refused."""

    token_ids: list[int]
    text: str | None
    """Null where the version is of another base model."""


class ClassifierItem(msgspec.Struct, frozen=True):
    """What a classifier tells apart: it answers /v1/classify, and has no text to answer with."""

    num_labels: int
    problem_type: str | None
    """As its config says: "single_label_classification", "multi_label_classification" or "regression"."""
    labels: list[str] | UnsetType | None = UNSET
    """Their names, in the order of an answer's `probs`; null where `id2label` of its config gives none. Absent where
    several models are listed."""
    score_template: str | UnsetType | None = UNSET
    """Of a reranker: the text that /v1/rerank asks it with; null where its config gives none. Absent likewise."""


class VersionItem(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable content of an adapter."""

    n: int
    """`name@v1` is number 1; a number is never used again."""
    digest: str
    """Hash of the content."""
    upload_id: str
    created_at: float
    """Unix seconds."""
    by: str
    """Id of the key that made it, or "open", "cli" or "config"."""
    size_bytes: int
    max_rank: int
    targets: list[str]
    """Kinds of modules it adapts."""
    invocation: InvocationItem | None
    """Null where it is no activated LoRA."""
    classifier: ClassifierItem | None
    """Null where it is none."""
    chat_template: str | None
    """Name of the operator's template that its chats are rendered with; null = the base model's."""
    bases: list[str]
    """The base models that it was checked against, as they were called; empty where that was not recorded."""
    fits: bool
    """Whether this server's base model is one of them, as far as that is known; requests for others are refused."""
    aliases: list[str]
    """Names that lead to it now."""
    tier: Tier
    memory_bytes: int | None
    """What it takes in the engine's memory; null until this server has loaded it."""
    last_used_at: float | None
    """By this server's engine, in Unix seconds; null if it was not used since the start."""
    num_hits: int
    """Requests since the start of this server."""
    load_ms: float | None
    """What its last load into the engine took."""
    object: str = "adapter.version"


class VersionList(msgspec.Struct, frozen=True):
    data: list[VersionItem]
    next_cursor: str | None
    object: str = "list"

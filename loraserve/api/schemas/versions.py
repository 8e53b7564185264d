"""/v1/adapters/{name}/versions."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.store.records import Tier


class InvocationItem(msgspec.Struct, frozen=True):
    """The tokens that activate an activated LoRA: it has an effect from their last occurrence in a prompt on. A prompt
    without them is refused."""

    token_ids: list[int]
    text: str | None
    """The tokens' text; null if the version was made for another base model."""


class ClassifierItem(msgspec.Struct, frozen=True):
    """The labels of a classifier. It answers /v1/classify and generates no text."""

    num_labels: int
    problem_type: str | None
    """ "single_label_classification", "multi_label_classification" or "regression", as in its config; null if that has
    none."""
    labels: list[str] | UnsetType | None = UNSET
    """Label names, in the order of an answer's `probs`; null if the config has no `id2label`. Absent from lists of
    models."""
    score_template: str | UnsetType | None = UNSET
    """For a reranker: the text into which /v1/rerank puts query and document; null if the config has none. Absent from
    lists of models."""


class VersionItem(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable content of an adapter."""

    n: int
    """`name@v1` is number 1. A number is never reused."""
    digest: str
    """Hash of the content."""
    upload_id: str
    created_at: float
    """Unix seconds."""
    by: str
    """Id of the key that created it, or "open" or "config"."""
    size_bytes: int
    """Size of its files."""
    max_rank: int
    """Largest LoRA rank."""
    targets: list[str]
    """Module kinds that it adapts, such as "q_proj"."""
    invocation: InvocationItem | None
    """Null if it is not an activated LoRA."""
    classifier: ClassifierItem | None
    """Null if it is not a classifier."""
    chat_template: str | None
    """Name of the operator's template that renders its chats; null = the base model's template."""
    chat_template_missing: bool
    """True: this server has no template of that name, and refuses chats with this version (409)."""
    trained_token_ids: list[int]
    """Tokens with rows of its own in the embedding or `lm_head`, ascending; empty if there are none."""
    own_tables: list[str]
    """Names of whole tables, the embedding or `lm_head`, that it has in place of the base's; empty if there are
    none."""
    use_dora: bool
    """Whether its linear layers have DoRA's magnitudes; false also if that was not recorded."""
    use_rslora: bool
    """Whether alpha is divided by the square root of the rank (rsLoRA) instead of the rank; likewise."""
    bases: list[str]
    """Names of the base models that it was checked against; empty if that was not recorded."""
    fits: bool
    """False: it was made for a base model other than this server's, and requests to it are refused (409)."""
    aliases: list[str]
    """Aliases that refer to it now."""
    tier: Tier
    """Where its bytes are: on disk ("disk"), mapped by the engine ("host") or in the engine's arena ("device")."""
    memory_bytes: int | None
    """Size in the engine's memory; null until this server has loaded it."""
    last_used_at: float | None
    """Last use on this server; Unix seconds. Null if not used since the server started."""
    num_hits: int
    """Requests since this server started."""
    load_ms: float | None
    """Duration of its last load into the engine; null if not loaded yet."""
    object: str = "adapter.version"


class VersionList(msgspec.Struct, frozen=True):
    data: list[VersionItem]
    next_cursor: str | None
    """Send it as `cursor` to get the next page; null on the last page."""
    object: str = "list"

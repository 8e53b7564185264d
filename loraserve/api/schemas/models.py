"""/v1/models."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.api.schemas.versions import ClassifierItem, InvocationItem


class ModelPermission(msgspec.Struct, frozen=True):
    """Fixed values for clients that expect this object."""

    id: str
    created: int
    """Unix seconds."""
    object: str = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class AdapterCard(msgspec.Struct, frozen=True):
    """The version that the name refers to."""

    rank: int
    """Largest LoRA rank of its modules."""
    size_bytes: int
    """Size of the version's files."""
    digest: str
    """Hash of the content."""
    version: int
    invocation: InvocationItem | UnsetType = UNSET
    """Absent if it is not an activated LoRA."""
    classifier: ClassifierItem | UnsetType = UNSET
    """Absent if it is not a classifier."""
    chat_template: str | UnsetType = UNSET
    """Name of the operator's template that renders its chats; absent = the base model's template."""


class ModelCard(msgspec.Struct, frozen=True):
    """The base model or an adapter."""

    id: str
    """Sent as `model` in requests."""
    created: int
    """Unix seconds: start of the server, or creation of the adapter's version."""
    owned_by: str
    root: str
    """The base model's first name, or the adapter's content digest; never a path on the server."""
    parent: str | None
    """The base model's first name; null for the base model itself."""
    max_model_len: int | None
    """Context length in tokens; null for adapters."""
    permission: list[ModelPermission]
    object: str = "model"
    adapter: AdapterCard | UnsetType = UNSET
    """Absent for the base model."""
    adapter_chat_templates: list[str] | UnsetType = UNSET
    """For the base model: the names that an adapter's config may use as `chat_template`; absent if there are none."""


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"

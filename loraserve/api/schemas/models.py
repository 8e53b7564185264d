"""/v1/models."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.api.schemas.versions import ClassifierItem, InvocationItem


class ModelPermission(msgspec.Struct, frozen=True):
    id: str
    created: int
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
    rank: int
    """The largest of its modules' ranks."""
    size_bytes: int
    digest: str
    version: int
    invocation: InvocationItem | UnsetType = UNSET
    """Absent where it is no activated LoRA."""
    classifier: ClassifierItem | UnsetType = UNSET
    """Absent where it is none."""
    chat_template: str | UnsetType = UNSET
    """Name of the operator's template that its chats are rendered with; absent = the base model's."""


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int
    owned_by: str
    root: str
    """The base model's name, or the adapter's content digest; never a path of this server."""
    parent: str | None
    """None for the base model."""
    max_model_len: int | None
    permission: list[ModelPermission]
    object: str = "model"
    adapter: AdapterCard | UnsetType = UNSET
    adapter_chat_templates: list[str] | UnsetType = UNSET
    """Of the base model: names that an adapter's config may have as `chat_template`; absent where there are none."""


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"

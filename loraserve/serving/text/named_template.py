"""A chat template that adapters may choose."""

import msgspec


class NamedChatTemplate(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    source: str
    """Jinja, from the operator: never from a tenant."""
    stop_tokens: list[str] = []
    """With which a turn of it ends, besides the model's own."""

"""A chat template that adapters may choose."""

import msgspec


class NamedChatTemplate(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    source: str
    """Jinja, from the operator: never from a tenant."""
    stop_tokens: list[str] = []
    """Tokens that end a turn of this template, besides the model's own."""

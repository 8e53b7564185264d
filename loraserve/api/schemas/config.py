"""/v1/config: the settings in effect and the source of each."""

import msgspec


class ConfigItem(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Name of the flag without its dashes, such as "max-num-seqs"."""
    value: str
    """Always a string; secrets appear as "***"."""
    source: str
    """ "flag", "environment", "file", "default" or "derived" (chosen by the server at start)."""
    help: str
    """Description of the setting."""


class ConfigView(msgspec.Struct, frozen=True):
    data: list[ConfigItem]
    object: str = "config"

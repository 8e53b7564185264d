"""/v1/config: the settings in force, and where each one came from."""

import msgspec


class ConfigItem(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """As the flag without dashes, such as "max-num-seqs"."""
    value: str
    """As text; secrets are shown as "***"."""
    source: str
    """ "flag", "environment", "file", "default" or "derived"."""
    help: str


class ConfigView(msgspec.Struct, frozen=True):
    data: list[ConfigItem]
    object: str = "config"

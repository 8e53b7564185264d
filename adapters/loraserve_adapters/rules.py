"""What a server requires of adapters, besides that they fit its base model's layout."""

from dataclasses import dataclass

from loraserve_adapters.limits import DEFAULT_LIMITS, AdapterLimits


@dataclass(frozen=True, slots=True)
class AdapterRules:
    limits: AdapterLimits = DEFAULT_LIMITS
    base_names: tuple[str, ...] = ()
    """All names of the base model, of which adapters may say that it is theirs; the first one is shown."""
    chat_templates: tuple[str, ...] | None = None
    """Names of chat templates that adapters may choose from; None = any."""


DEFAULT_RULES = AdapterRules()

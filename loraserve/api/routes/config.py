"""GET /v1/config."""

from litestar import get
from litestar.di import NamedDependency

from loraserve.api.app_context import AppContext
from loraserve.api.http.needs import needs
from loraserve.api.openapi.document import ERROR_RESPONSES
from loraserve.api.schemas.config import ConfigItem, ConfigView
from loraserve.control.tenancy.principal import Action
from loraserve.engine.model_description import ModelDescription
from loraserve.serving.settings import SettingSource, SettingValue

UNSET_VALUES = ("", "auto")


@get("/v1/config", opt=needs(Action.ADMINISTER_ALL), responses=ERROR_RESPONSES, tags=["config"])
async def get_config(context: NamedDependency[AppContext]) -> ConfigView:
    """Every setting in effect and its source; "derived" = chosen by the server at start."""
    derived = derived_values(context.runtime.engine.model)
    return ConfigView([_item(value, derived) for value in context.runtime.settings.config])


def derived_values(model: ModelDescription) -> dict[str, str]:
    """The values that the server chose for settings that left the choice to it."""
    return {
        "model": model.name,
        "dtype": model.dtype,
        "kv-cache-dtype": model.kv_cache_dtype,
        "device": model.device,
        "backend": model.backend,
        "max-model-len": str(model.max_model_len),
        "adapter-memory-bytes": str(model.arena_size_bytes),
        "adapter-host-memory-bytes": str(model.host_tier_bytes),
        "kv-cache-memory-bytes": f"{model.num_blocks} blocks of {model.block_size} tokens",
    }


def _item(value: SettingValue, derived: dict[str, str]) -> ConfigItem:
    if value.source is SettingSource.DEFAULT and value.value in UNSET_VALUES and value.name in derived:
        return ConfigItem(name=value.name, value=derived[value.name], source="derived", help=value.help)
    return ConfigItem(name=value.name, value=value.value, source=value.source, help=value.help)

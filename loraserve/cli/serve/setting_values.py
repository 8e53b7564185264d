"""Every option's value as text, and its source."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import rich_click as click
from click.core import ParameterSource

from loraserve.cli.serve.option_types import AdapterChatTemplate, LoraModule
from loraserve.cli.serve.settings import ServeSettings
from loraserve.serving.settings import SettingSource, SettingValue

SOURCES = {
    ParameterSource.COMMANDLINE: SettingSource.FLAG,
    ParameterSource.ENVIRONMENT: SettingSource.ENVIRONMENT,
    ParameterSource.DEFAULT_MAP: SettingSource.FILE,
}
SECRET = "***"
SECRET_OPTIONS = ("api_key",)
URL_OPTIONS = ("redis_url", "otlp_traces_endpoint")


def with_setting_values(settings: ServeSettings, ctx: click.Context, positional_model: str | None) -> ServeSettings:
    """positional_model: the argument MODEL, which counts as a flag."""
    given = {**ctx.params, "model": positional_model or ctx.params.get("model")}
    derived = _derived(settings)
    values = [
        _value(option, given, is_argument=option.name == "model" and positional_model is not None, ctx=ctx)
        for option in ctx.command.params
        if isinstance(option, click.Option) and not option.hidden and option.name in given
    ]
    return replace(settings, config=tuple(_filled(value, derived) for value in sorted(values, key=_name)))


def _name(value: SettingValue) -> str:
    return value.name


def _filled(value: SettingValue, derived: Mapping[str, str]) -> SettingValue:
    if value.value or value.name not in derived:
        return value
    return SettingValue(name=value.name, value=derived[value.name], source=SettingSource.DERIVED, help=value.help)


def _value(option: click.Option, given: Mapping[str, Any], *, is_argument: bool, ctx: click.Context) -> SettingValue:
    assert option.name is not None
    source = SOURCES.get(ctx.get_parameter_source(option.name) or ParameterSource.DEFAULT, SettingSource.DEFAULT)
    return SettingValue(
        name=option.name.replace("_", "-"),
        value=_text(option.name, given[option.name]),
        source=SettingSource.FLAG if is_argument else source,
        help=option.help or "",
    )


def _derived(settings: ServeSettings) -> dict[str, str]:
    """Values of options that were not given, derived from other options."""
    derived = {"data-dir": str(settings.data_path), "served-model-name": ", ".join(settings.model_names)}
    if (traces := settings.trace_destination) is not None and traces.problem is None:
        derived["otlp-traces-endpoint"] = without_secrets(traces.endpoint)
    return derived if settings.uds is not None else {**derived, "host": settings.bind_host}


def _text(name: str, value: Any) -> str:
    """Without secrets."""
    if value is None or value == ():
        return ""
    if name in SECRET_OPTIONS:
        return SECRET
    if name in URL_OPTIONS:
        return without_secrets(str(value))
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        named = LoraModule | AdapterChatTemplate
        return ", ".join(f"{item.name}={item.path}" if isinstance(item, named) else str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def without_secrets(url: str) -> str:
    """For a URL such as redis://user:password@host/0?password=…: hides the password and the whole query."""
    parts = urlsplit(url)
    credentials, at, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    netloc = f"{user}:{SECRET}@{host}" if at else host
    query = f"?{SECRET}" if parts.query else ""
    return f"{parts.scheme}://{netloc}{parts.path}{query}"

"""`--config FILE`: a TOML table of flags without their dashes. Flags and environment variables override it."""

import difflib
import tomllib
from pathlib import Path
from typing import Any

import rich_click as click
from click.types import BoolParamType, FloatParamType, IntParamType

from loraserve.cli.serve.option_types import ChatTemplateType, HumanInt, LoraModuleType


def load_config_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Callback of an eager option: makes the file's values the defaults of the other options."""
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}", ctx, param) from error
    options = {option.name: option for option in ctx.command.params if option.name and option is not param}
    ctx.default_map = {}
    for key, value in values.items():
        option = options.get(key.replace("-", "_"))
        if option is None:
            raise click.BadParameter(f"{path}: {_unknown(key, list(options))}", ctx, param)
        values_of_option = _as_option_value(option, value)
        for each in values_of_option if getattr(option, "multiple", False) else [values_of_option]:
            if (expected := _expected(option.type, each)) is not None:
                raise click.BadParameter(f"{path}: {key} must be {expected}", ctx, param)
        ctx.default_map[option.name] = values_of_option


def _unknown(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
    hint = f"; did you mean {close[0].replace('_', '-')!r}?" if close else ""
    return f"there is no option {key!r}{hint}"


def _as_option_value(option: click.Parameter, value: Any) -> Any:
    """A repeatable option also accepts a single value."""
    is_repeatable = getattr(option, "multiple", False)
    return [value] if is_repeatable and not isinstance(value, list) else value


def _expected(kind: click.ParamType, value: Any) -> str | None:
    """None if a value of that type can be meant. click would take 1 for true and write any value as text."""
    if isinstance(value, str):
        return None  # read as on the command line
    match kind:
        case BoolParamType():
            types, expected = bool, "true or false"
        case IntParamType():
            types, expected = int, "a whole number"
        case FloatParamType() | HumanInt():
            types, expected = int | float, "a number"
        case LoraModuleType() | ChatTemplateType():
            types, expected = dict, "text in quotes or a table"
        case _:
            return "text in quotes"
    return None if isinstance(value, types) and (types is bool or not isinstance(value, bool)) else expected

"""Types of command-line options beyond words and plain numbers."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import rich_click as click
from loraserve_adapters.config_values import TEMPLATE_NAME_RULE, is_template_name

from loraserve.cli.adapter_place import find_adapter, is_hugging_face_name, not_found
from loraserve.cli.serve.trace_settings import collector_url
from loraserve.live.key_names import PREFIX_PATTERN, PREFIX_RULE
from loraserve.serving.text.named_template import NamedChatTemplate

_HUMAN_INT = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<suffix>[kKmMgGtT])?(i?B)?")
_EXPONENTS = {"k": 1, "m": 2, "g": 3, "t": 4}


class HumanInt(click.ParamType):
    """A count with vLLM's suffixes: 32k = 32 000, 32K = 32 768; so m/M, g/G and t/T."""

    name = "count"

    def __init__(self, *, may_be_zero: bool = False) -> None:
        self._may_be_zero = may_be_zero

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _HUMAN_INT.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a whole number, with or without a suffix such as 32k or 4G", param, ctx)
        number = float(match["number"]) * _factor(match["suffix"])
        if not number.is_integer():
            self.fail(f"{value!r} is not a whole number", param, ctx)
        if number < 0 or (number == 0 and not self._may_be_zero):
            self.fail(f"{value!r} must be above 0", param, ctx)
        return int(number)


def _factor(suffix: str | None) -> int:
    if suffix is None:
        return 1
    return (1000 if suffix.islower() else 1024) ** _EXPONENTS[suffix.lower()]


class RedisUrlType(click.ParamType):
    """The start of a server checks the rest. Messages do not quote the URL: it may contain a password."""

    name = "url"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parts = urlsplit(str(value))
            is_valid = parts.scheme in ("redis", "rediss", "unix") and parts.port != 0
        except ValueError:  # such as a port that is not a number, or a bracket without its counterpart
            is_valid = False
        if not is_valid:
            rule = "write redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix://PATH, and %2F for a / in a password"
            self.fail(f"the URL cannot be read: {rule}", param, ctx)
        return str(value)


class PatternType(click.ParamType):
    """Text of one form."""

    def __init__(self, name: str, pattern: re.Pattern[str], rule: str) -> None:
        """name: in the help. rule: what a refused value is told, after the value."""
        self.name = name
        self._pattern = pattern
        self._rule = rule

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not self._pattern.fullmatch(str(value)):
            self.fail(f"{value!r} {self._rule}", param, ctx)
        return str(value)


REDIS_PREFIX = PatternType("text", PREFIX_PATTERN, PREFIX_RULE)
HOST_NAME = PatternType(
    "host",
    re.compile(r"\[[0-9A-Fa-f:.]+\]|[^\s/:*\[\]]+"),
    "is not a host name or address without port, such as example.com or [::1]",
)
"""As it is compared with Host headers, whose port does not count."""
ORIGIN = PatternType(
    "origin",
    re.compile(r"null|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\sA-Z/?#@*:\[\]]+)(:\d+)?"),
    "is not an origin, such as https://example.com: no path, no final / and no *",
)
"""As browsers send it: anything else would never be equal to theirs."""


class DeviceType(click.ParamType):
    """auto, cpu, cuda or cuda:<number>; the engine checks whether that GPU exists."""

    name = "device"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)):
            self.fail(f"{value!r} is not one of auto, cpu, cuda and cuda:<number>", param, ctx)
        return str(value)


class CollectorUrlType(click.ParamType):
    """URL that spans are posted to."""

    name = "url"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return collector_url(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to serve from the start."""

    name: str
    path: Path
    base_model_name: str | None = None
    """The base model it was made for; None = not given."""


class LoraModuleType(click.ParamType):
    """`name=path`, or vLLM's JSON form `{"name": …, "path": …, "base_model_name": …}`."""

    name = "name=path"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> LoraModule:
        if isinstance(value, LoraModule):
            return value
        if isinstance(value, dict):
            return self._from_fields(value, param, ctx)
        return self._from_fields(_named_path(self, str(value), param, ctx), param, ctx)

    def split_envvar_value(self, rv: str) -> list[str]:
        return _named_paths(rv)

    def _place(self, path: str, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Fails only for a missing Hugging Face name. A missing folder is reported later, with the adapter's name."""
        folder = Path(path).expanduser()
        found = find_adapter(path if is_hugging_face_name(path) else str(folder))
        if found is None and is_hugging_face_name(path):
            self.fail(not_found(path), param, ctx)
        return found or folder

    def _from_fields(
        self, fields: dict[str, object], param: click.Parameter | None, ctx: click.Context | None
    ) -> LoraModule:
        if unknown := fields.keys() - {"name", "path", "base_model_name", "is_3d_lora_weight"}:
            self.fail(f"unknown field {sorted(unknown)[0]!r}; known fields: name, path, base_model_name", param, ctx)
        name, path = fields.get("name"), fields.get("path")
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            self.fail(f"{fields!r} needs name and path, both strings", param, ctx)
        base_model_name = fields.get("base_model_name") or None
        if not isinstance(base_model_name, str | None):
            self.fail(f"{fields!r} has a base_model_name that is not a string", param, ctx)
        # The value is not used: the adapter's tensors show whether they belong to single experts.
        if not isinstance(fields.get("is_3d_lora_weight"), bool | None):
            self.fail(f"{fields!r} has an is_3d_lora_weight that is not true or false", param, ctx)
        return LoraModule(name, self._place(path, param, ctx), base_model_name)


@dataclass(frozen=True, slots=True)
class AdapterChatTemplate:
    """A chat template that adapters can choose."""

    path: Path
    template: NamedChatTemplate

    @property
    def name(self) -> str:
        return self.template.name


class ChatTemplateType(click.ParamType):
    """`name=path`, or as JSON `{"name": …, "path": …, "stop_tokens": […]}`."""

    name = "name=path"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> AdapterChatTemplate:
        if isinstance(value, AdapterChatTemplate):
            return value
        fields = value if isinstance(value, dict) else _named_path(self, str(value), param, ctx)
        if unknown := fields.keys() - {"name", "path", "stop_tokens"}:
            self.fail(f"unknown field {sorted(unknown)[0]!r}; known fields: name, path, stop_tokens", param, ctx)
        name, path, stop_tokens = fields.get("name"), fields.get("path"), fields.get("stop_tokens", [])
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            self.fail(f"{fields!r} needs name and path, both strings", param, ctx)
        if not is_template_name(name):
            self.fail(f"{name!r} is not a valid name for a chat template: {TEMPLATE_NAME_RULE}", param, ctx)
        if not (isinstance(stop_tokens, list) and all(isinstance(token, str) for token in stop_tokens)):
            self.fail(f"{fields!r} has stop_tokens that are not a list of strings", param, ctx)
        file = Path(path).expanduser()
        source = self._source(file, param, ctx)
        return AdapterChatTemplate(file, NamedChatTemplate(name=name, source=source, stop_tokens=stop_tokens))

    def _source(self, file: Path, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Parses the template now: otherwise a broken one would be found once the model is loaded, minutes later."""
        from jinja2 import TemplateError

        from loraserve.serving.text.chat_template import ChatTemplate

        try:
            source = file.read_text(encoding="utf-8")
            ChatTemplate(source, {})
        except OSError as error:
            self.fail(f"{file} cannot be read: {error.strerror}", param, ctx)
        # Not UTF-8, a zero byte in the file's name, a syntax error, or nested too deeply for Jinja or Python.
        except (ValueError, TemplateError, RecursionError, SyntaxError) as error:
            self.fail(f"{file} is not a valid Jinja template: {error}", param, ctx)
        return source

    def split_envvar_value(self, rv: str) -> list[str]:
        return _named_paths(rv)


def _named_paths(text: str) -> list[str]:
    """Splits a variable's values at white space, except within JSON objects."""
    found: list[str] = []
    while text := text.strip():
        end = len(text.split(maxsplit=1)[0])
        if text.startswith("{"):
            try:
                end = json.JSONDecoder().raw_decode(text)[1]
            except json.JSONDecodeError:
                end = len(text)  # its conversion will report it
        found.append(text[:end])
        text = text[end:]
    return found


def _named_path(
    kind: click.ParamType, text: str, param: click.Parameter | None, ctx: click.Context | None
) -> dict[str, object]:
    """The fields of `name=path` or of a JSON object."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            kind.fail(f"{text!r} is not valid JSON: {error}", param, ctx)
    name, separator, path = text.partition("=")
    if not (separator and name and path):
        kind.fail(f"{text!r} is neither name=path nor a JSON object with name and path", param, ctx)
    return {"name": name, "path": path}

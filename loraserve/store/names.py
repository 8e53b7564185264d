"""The syntax of names and of a request's `model`. No name ever becomes a path: see `documents.py`."""

import re
from collections.abc import Collection

import msgspec

from loraserve.store.errors import InvalidNameError
from loraserve.store.records import LIVE_ALIAS

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TENANT_NAME = ADAPTER_NAME
ALIAS_NAME = re.compile(r"(?!v[0-9]+\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Excludes names such as `v3`, which denote versions."""
DIGEST = re.compile(r"[0-9a-f]{64}")

_VERSION = re.compile(r"v([1-9][0-9]{0,8})")
_ALPHABET = "1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"


class BaseRef(msgspec.Struct, frozen=True):
    """The base model without an adapter."""


class AdapterRef(msgspec.Struct, frozen=True):
    """An alias of an adapter or, if `version` is not None, that version of it."""

    name: str
    alias: str = LIVE_ALIAS
    version: int | None = None


ModelRef = BaseRef | AdapterRef


def parse_model_ref(model: str, served_names: Collection[str]) -> ModelRef | None:
    """`name`, `name@alias` or `name@v3`, each optionally prefixed with `<base>:`; `<base>` alone is the base model.

    None if it is not a valid model name; answer that like a model that does not exist.
    """
    if model in served_names:
        return BaseRef()
    prefix = next((f"{base}:" for base in served_names if model.startswith(f"{base}:")), "")
    model = model.removeprefix(prefix)
    name, at, selector = model.partition("@")
    if not ADAPTER_NAME.fullmatch(name):
        return None
    if not at:
        return AdapterRef(name)
    version = _VERSION.fullmatch(selector)
    if version:
        return AdapterRef(name, version=int(version[1]))
    return AdapterRef(name, alias=selector) if ALIAS_NAME.fullmatch(selector) else None


def check_adapter_name(name: str, served_names: Collection[str]) -> None:
    """Raises `InvalidNameError`. served_names: the base model's names, which adapters may not use."""
    if not ADAPTER_NAME.fullmatch(name):
        raise InvalidNameError(f"an adapter cannot be named {_shown(name)}: use {_ALPHABET}")
    if name in served_names:
        raise InvalidNameError(f"an adapter cannot be named {_shown(name)}, the base model's name: choose another")


def check_alias_name(name: str) -> None:
    """Raises `InvalidNameError`."""
    if not ALIAS_NAME.fullmatch(name):
        raise InvalidNameError(
            f"an alias cannot be named {_shown(name)}: use {_ALPHABET}, but not 'v' followed by a number"
        )


def check_tenant_name(name: str) -> None:
    """Raises `InvalidNameError`."""
    if not TENANT_NAME.fullmatch(name):
        raise InvalidNameError(f"a tenant cannot be named {_shown(name)}: use {_ALPHABET}")


def _shown(name: str) -> str:
    return ascii(name) if len(name) <= 80 else f"{name[:80]!a}… ({len(name)} characters)"

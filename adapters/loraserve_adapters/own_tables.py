"""Whole tables, the embedding or `lm_head`, that are the adapter's own: PEFT's `modules_to_save`.

Follows `set_additional_trainable_modules` and `LoraModel._add_modules_to_save_to_tie` of PEFT 0.21: the tables are
trained apart from each other, even if the base's are tied, unless the config has `ensure_weight_tying` and names one of
them as PEFT knows it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.config import CONFIG_NAME, AdapterConfig
from loraserve_adapters.errors import AdapterError, shown
from loraserve_adapters.safetensors_file import TensorEntry

FIELD = "modules_to_save"
SAVED = "modules_to_save.weight"
"""PEFT's name for the second copy of an own table, which it saves if it saves the base's tables as well."""
_NAME = re.compile(r"[A-Za-z0-9_.]+")
_TIED_NAMES = ("embed_tokens", "lm_head")
"""`EMBEDDING_LAYER_NAMES` of PEFT."""


@dataclass(frozen=True, slots=True)
class OwnTable:
    module: BaseModule
    """The embedding or `lm_head`."""
    owner: str
    """The module under whose name its tensor is saved: the embedding, if `lm_head` has the same."""


@dataclass(frozen=True, slots=True)
class OwnTableTensor:
    table: OwnTable
    entry: TensorEntry
    """[num_rows, hidden_size], as `BaseModule.weight_shape`."""
    copies: tuple[TensorEntry, ...] = ()
    """Further copies, which must be equal."""


def resolve_own_tables(config: AdapterConfig, layout: BaseLayout) -> tuple[OwnTable, ...]:
    """In the layout's order. Raises `AdapterError`.

    As in PEFT, entries name all modules whose names end like them, and those that name none have no effect.
    """
    if not config.own_tables:
        return ()
    _check_entries(config.own_tables, layout)
    members = [module for group in layout.groups for module in group]
    tables = [module for module in members if module.is_of_vocabulary]
    others = [*layout.other_modules, *(module.name for module in members if not module.is_of_vocabulary)]
    if wrong := [entry for entry in config.own_tables if any(name.endswith(entry) for name in others)]:
        raise _not_a_table(wrong, tables, layout)
    found = {table.name for table in tables if any(table.name.endswith(entry) for entry in config.own_tables)}
    if not found:
        return ()
    embedding = next((table for table in tables if table.is_embedding), None)
    is_tied = any(table.is_tied for table in tables) and any(_is_of_tied(entry) for entry in config.own_tables)
    if config.ensures_weight_tying and embedding is not None and is_tied:
        return tuple(OwnTable(_checked(table, layout), embedding.name) for table in tables)
    return tuple(OwnTable(_checked(table, layout), table.name) for table in tables if table.name in found)


def _is_of_tied(entry: str) -> bool:
    """Whether PEFT takes it for the name of a table that can be tied."""
    return entry.rpartition(".")[2] in _TIED_NAMES


def _check_entries(entries: Iterable[str], layout: BaseLayout) -> None:
    """Refuse entries that PEFT also uses as patterns, for modules that they do not name: these would have no LoRA."""
    names = [*layout.other_modules, *(module.name for group in layout.groups for module in group)]
    for entry in entries:
        if _NAME.fullmatch(entry) is None:
            raise _refused("invalid_field", f"found {shown(entry)}, expected a module's name", found=shown(entry))
        pattern = re.compile(rf"(^|.*\.){entry}($|\..*)")
        other = next((name for name in names if pattern.match(name) and f".{entry}." not in f".{name}."), None)
        if other is not None:
            reason = f"found {shown(entry)}, which PEFT also takes for a pattern that matches {other}"
            raise _refused("unsupported_pattern", reason, found=shown(entry))


def _checked(table: BaseModule, layout: BaseLayout) -> BaseModule:
    if table.bias_sha256 is not None:
        reason = f"{table.name} of {layout.shown_as} has a bias, which PEFT trains with it: this is not supported"
        raise _refused("unsupported_option", reason, found=shown(table.name))
    return table


def _not_a_table(wrong: list[str], tables: list[BaseModule], layout: BaseLayout) -> AdapterError:
    names = [table.name for table in tables]
    which = f"only {' and '.join(names)}" if names else "no module"
    reason = f"found {shown(wrong)}: {which} of {layout.shown_as} can be an adapter's own"
    return _refused("unsupported_option", reason, found=shown(wrong), expected=shown(names))


def _refused(code: str, reason: str, *, found: str | None = None, expected: str | None = None) -> AdapterError:
    message = f"{CONFIG_NAME}: {FIELD}: {reason}"
    return AdapterError(code, message, file=CONFIG_NAME, key=FIELD, found=found, expected=expected)

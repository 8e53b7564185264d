"""Tokens whose rows of a table, the embedding or `lm_head`, are the adapter's own: PEFT's `trainable_token_indices`.

Follows `set_additional_trainable_modules` of PEFT 0.21: an `lm_head` that is tied to the embedding gets the same rows,
unless the config gives it others.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.config import CONFIG_NAME, AdapterConfig
from loraserve_adapters.errors import AdapterError, shown
from loraserve_adapters.own_tables import OwnTable
from loraserve_adapters.safetensors_file import TensorEntry

FIELD = "trainable_token_indices"
ROWS = "token_adapter.trainable_tokens_delta"
"""PEFT's name for their tensor: [num_tokens, hidden_size], the rows themselves, although the name says delta."""
_WITHOUT = f"Train the adapter without {FIELD}."


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    module: BaseModule
    """The table: the embedding or `lm_head`."""
    token_ids: tuple[int, ...]
    owner: str
    """The module under whose name their tensor is saved: the embedding, if a tied `lm_head` gets its rows."""


@dataclass(frozen=True, slots=True)
class TrainedRows:
    tokens: TrainedTokens
    entry: TensorEntry
    """[num_tokens, hidden_size]"""
    copy: TensorEntry | None = None
    """A second copy, which PEFT saves for a tied `lm_head` if it saves the base's tables as well."""


def resolve_trained_tokens(
    config: AdapterConfig, layout: BaseLayout, targeted: Iterable[BaseModule], own_tables: Iterable[OwnTable]
) -> tuple[TrainedTokens, ...]:
    """Those of the embedding, of `lm_head`, or of both. targeted: modules with LoRA. Raises `AdapterError`."""
    if not config.trained_tokens:
        return ()
    members = [module for group in layout.groups for module in group]
    embedding = next((module for module in members if module.is_embedding), None)
    head = next((module for module in members if module.is_linear and module.is_of_vocabulary), None)
    is_body = layout.is_headless or config.is_classifier
    ids_of: dict[str, tuple[int, ...]] = {}
    for name, token_ids in config.trained_tokens:
        table = next((table for table in (embedding, head) if table is not None and _is_named(name, table)), None)
        if table is None and embedding is None:
            raise _refused(
                "unsupported_module", "the base model's embedding cannot have trained tokens", remedy=_WITHOUT
            )
        if table is None:
            known = " and ".join(module.name for module in (embedding, head) if module is not None)
            raise _refused("unknown_module", f"{shown(name)} is not a table of {layout.shown_as}, which has {known}")
        if table.is_embedding and head is None and not is_body:
            reason = "the base model's lm_head, which may be tied, cannot have trained tokens"
            raise _refused("unsupported_module", reason, remedy=_WITHOUT)
        if table.name in ids_of:
            raise _refused("invalid_field", f"names {table.name} twice")
        ids_of[table.name] = token_ids
    if config.ensures_weight_tying and head is not None and head.is_tied and len({*ids_of.values()}) > 1:
        raise _refused("invalid_field", f"different tokens for {head.name} cannot be combined with ensure_weight_tying")
    found = [*_tokens_of(embedding, head, ids_of)]
    others = {module.name: "LoRA on" for module in targeted}
    others |= {own.module.name: "modules_to_save for" for own in own_tables}
    for tokens in found:
        _check_tokens(tokens, layout)
        if tokens.module.name in others:
            tied = ", which is tied to the embedding" if tokens.owner != tokens.module.name else ""
            other = f"{others[tokens.module.name]} {tokens.module.name}"
            raise _refused("invalid_field", f"cannot be combined with {other}{tied}")
    return tuple(found)


def _is_named(name: str, table: BaseModule) -> bool:
    return table.is_embedding if name == "" else f".{table.name}".endswith(f".{name}")


def _tokens_of(
    embedding: BaseModule | None, head: BaseModule | None, ids_of: dict[str, tuple[int, ...]]
) -> Iterator[TrainedTokens]:
    of_embedding = None if embedding is None else ids_of.get(embedding.name)
    if embedding is not None and of_embedding is not None:
        yield TrainedTokens(embedding, of_embedding, embedding.name)
    if head is None:
        return
    of_head = ids_of.get(head.name)
    if embedding is not None and of_embedding is not None and head.is_tied and of_head in (None, of_embedding):
        yield TrainedTokens(head, of_embedding, embedding.name)
    elif of_head is not None:
        yield TrainedTokens(head, of_head, head.name)


def _check_tokens(tokens: TrainedTokens, layout: BaseLayout) -> None:
    module, num_rows, largest = tokens.module, tokens.module.weight_shape[0], max(tokens.token_ids)
    if largest >= num_rows:
        reason, expected = f"token id {largest} is outside {module.name} of {layout.shown_as}", f"0 to {num_rows - 1}"
        remedy = "Serve a base model that has rows for the added tokens."
        raise _refused("invalid_field", f"{reason} ({expected})", found=str(largest), expected=expected, remedy=remedy)
    if layout.vocab_size is not None and largest >= layout.vocab_size:
        reason, expected = f"the served tokenizer has no token id {largest}", f"0 to {layout.vocab_size - 1}"
        remedy = "Serve the base model with the tokenizer that the adapter was trained with (--tokenizer)."
        raise _refused("invalid_field", f"{reason} ({expected})", found=str(largest), expected=expected, remedy=remedy)
    if module.bias_sha256 is not None:
        raise _refused(
            "unsupported_option", f"{module.name} has a bias, which PEFT ignores if there are trained tokens"
        )


def _refused(
    code: str, reason: str, *, found: str | None = None, expected: str | None = None, remedy: str | None = None
) -> AdapterError:
    message = f"{CONFIG_NAME}: {FIELD}: {reason}"
    return AdapterError(code, message, file=CONFIG_NAME, key=FIELD, found=found, expected=expected, remedy=remedy)

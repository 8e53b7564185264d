"""Adapters of a model's other class: of the one that also takes images, if the text-only one is served, or the reverse.

The two have the same text decoder and `lm_head`. What is below `model.` in the text-only class is below
`model.language_model.` in the other, next to what reads images. With either class, PEFT matches the config's names and
patterns against that class's names. Only the tensors show which of the two was trained.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.source_module import KEY_PREFIX

BODY = "model"
_DECODER = "language_model"
_OF_TEXT_ONLY = f"{BODY}."
_OF_TOWERS = f"{BODY}.{_DECODER}."
"""What the decoder's names begin with in the class that has towers, such as one for images, too."""


def other_class(layout: BaseLayout) -> BaseLayout | None:
    """The layout with the names of the other class, and the served one's fingerprint; None if it cannot have one."""
    found = decoder_prefixes(layout)
    if found is None:
        return None
    own, other = found

    def of_decoder(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(renamed(name, own, other) for name in names if not _is_beside(name, own))

    groups = tuple(
        tuple(replace(module, name=renamed(module.name, own, other)) for module in group) for group in layout.groups
    )
    has_towers = other == _OF_TOWERS
    return replace(
        layout,
        groups=groups,
        other_modules=(*of_decoder(layout.other_modules), *((_OF_TOWERS.removesuffix("."),) if has_towers else ())),
        embedding_modules=of_decoder(layout.embedding_modules),
        unreached_linears=of_decoder(layout.unreached_linears),
        is_other_class=True,
        lacks_modules=has_towers,
    )


def names_other_class(tensor_names: Iterable[str], layout: BaseLayout) -> bool:
    """Whether some tensors have names of the other class's decoder, with or without the body's, and none has the served
    one's."""
    found = decoder_prefixes(layout)
    if found is None:
        return False
    names = (name.removeprefix(KEY_PREFIX) for name in tensor_names if name.startswith(KEY_PREFIX))
    roots = {name.removeprefix(_OF_TEXT_ONLY).partition(".")[0] for name in names}
    has_text_only_names = not roots.isdisjoint(_parts_of_decoder(layout, found[0]))
    if found[0] == _OF_TEXT_ONLY:
        return _DECODER in roots and not has_text_only_names
    return has_text_only_names and _DECODER not in roots


def to_served_class(layout: BaseLayout) -> Callable[[BaseModule], BaseModule]:
    """A function that gives modules of `other_class(layout)` the names that they have in the layout."""
    found = decoder_prefixes(layout)
    assert found is not None
    own, other = found
    return lambda module: replace(module, name=renamed(module.name, other, own))


def renamed(name: str, old: str, new: str) -> str:
    """A name with another prefix, if it has the old one."""
    return new + name.removeprefix(old) if name.startswith(old) else name


def is_beside_decoder(tensor_name: str, layout: BaseLayout) -> bool:
    """Whether a tensor belongs to a module that the layout lacks, such as one of an image tower: text reaches none."""
    is_named = layout.lacks_modules and tensor_name.startswith(KEY_PREFIX)
    return is_named and _is_beside(tensor_name.removeprefix(KEY_PREFIX), _OF_TOWERS)


def decoder_prefixes(layout: BaseLayout) -> tuple[str, str] | None:
    """What the decoder's names begin with: (in the served class, in the other).

    None unless all adaptable modules below the body are the decoder's, and the other class's names mean nothing else.
    """
    if layout.is_headless or layout.is_other_class:
        return None
    adaptable = [module.name for group in layout.groups for module in group]
    own = _OF_TOWERS if any(name.startswith(_OF_TOWERS) for name in adaptable) else _OF_TEXT_ONLY
    other = _OF_TEXT_ONLY if own == _OF_TOWERS else _OF_TOWERS
    if not any(name.startswith(own) for name in adaptable) or any(_is_beside(name, own) for name in adaptable):
        return None
    parts = _parts_of_decoder(layout, own)
    beside = {name.split(".")[1] for name in layout.other_modules if _is_beside(name, own)}
    return None if _DECODER in parts or not beside.isdisjoint(parts) else (own, other)


def _parts_of_decoder(layout: BaseLayout, own: str) -> set[str]:
    """Such as "layers" and "embed_tokens"."""
    names = (*layout.other_modules, *(module.name for group in layout.groups for module in group))
    return {name.removeprefix(own).partition(".")[0] for name in names if name.startswith(own)}


def _is_beside(name: str, prefix: str) -> bool:
    """Whether the name is in the body, but not in its decoder."""
    return name.startswith(_OF_TEXT_ONLY) and not name.startswith(prefix)

"""Gives a model's modules the names that they have in its other class, as PEFT found them in training."""

from collections.abc import Iterator
from contextlib import contextmanager

from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.other_class import BODY, decoder_prefixes, renamed
from torch import nn
from transformers import PreTrainedModel


class _Body(nn.Module):
    """Stands in for the model's body while modules are looked up and replaced by name; never called."""

    def __init__(self, decoder: PreTrainedModel, *, is_nested: bool) -> None:
        super().__init__()
        self.get_input_embeddings = decoder.get_input_embeddings
        if is_nested:
            self.language_model = decoder
        else:
            # The decoder's own dict, so that a module replaced here is replaced there.
            self._modules = decoder._modules


@contextmanager
def named_as_other_class(model: PreTrainedModel, layout: BaseLayout) -> Iterator[None]:
    """In the block, the decoder's modules have the names that they have in `other_class(layout)`. Modules that are
    replaced meanwhile stay replaced. layout: the model's."""
    found = decoder_prefixes(layout)
    assert found is not None
    served, other = found
    decoder, own_body, tied = model.get_submodule(served.removesuffix(".")), model.get_submodule(BODY), _tied(model)
    assert isinstance(decoder, PreTrainedModel)
    setattr(model, BODY, _Body(decoder, is_nested=len(other) > len(served)))
    model._tied_weights_keys = {name: renamed(weight, served, other) for name, weight in tied.items()}
    try:
        yield
    finally:
        setattr(model, BODY, own_body)
        model._tied_weights_keys = tied


def _tied(model: PreTrainedModel) -> dict[str, str]:
    return getattr(model, "_tied_weights_keys", None) or {}

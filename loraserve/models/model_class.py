"""Which of transformers' classes a checkpoint is loaded with."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig

from loraserve.models.errors import ModelRefusedError

_SEES_AHEAD = frozenset({"paligemma"})
"""The tokens of a prompt attend to those after them, which no proof against a causal pass would notice."""


def auto_class(config: PreTrainedConfig) -> Any:
    """`AutoModelForCausalLM`, or for models of text with images or sounds that have no class there (Mistral 3, Qwen-VL)
    the one with everything, of which we serve the text decoder. Raises `ModelRefusedError`."""
    if config.model_type in _SEES_AHEAD:
        raise ModelRefusedError(
            f"model_type {config.model_type!r} cannot be served: tokens of a prompt attend to those after them"
        )
    for found in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        if type(config) in found._model_mapping and not config.is_encoder_decoder:
            return found
    raise ModelRefusedError(
        f"model_type {config.model_type!r} cannot be served: it is not a decoder-only model that generates text"
    )

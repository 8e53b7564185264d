"""Whether two names mean the same base model, whose folders and quantized copies have many names."""

import re
from collections.abc import Iterable

_FORM = re.compile(
    r"(?:[-_.](?:awq|gptq|gptqmodel|bnb|unsloth|quantized|dynamic|marlin|nf4|fp4|mxfp4|nvfp4|fp8|fp16|bf16"
    r"|int[48]|[48]-?bit|w\d+a\d+|g(?:32|64|128)|128g))+$"
)
"""Ends of names that say how weights are stored: Llama-3.1-8B-Instruct-AWQ-INT4, llama-3-8b-bnb-4bit."""
_LONGEST_FORM = 64
"""Characters searched at the end of a name: names are untrusted, and a search takes quadratic time."""


def base_model_stem(name: str) -> str:
    """The part of a path or Hugging Face name that names the model itself, casefolded.

    It excludes the owner and how the weights are stored: adapters are trained on a four-bit copy and served on the
    original, or the other way round.
    """
    last = name.rstrip("/").rpartition("/")[2].casefold()
    form = _FORM.search(last, max(0, len(last) - _LONGEST_FORM))
    return last[: form.start()] or last if form else last


def is_base_name(name: str, base_names: Iterable[str]) -> bool:
    return base_model_stem(name) in map(base_model_stem, base_names)

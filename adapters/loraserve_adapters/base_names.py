"""Whether two names are of one base model, which has as many as people have folders and quantized copies."""

import re
from collections.abc import Iterable

_FORM = re.compile(
    r"(?:[-_.](?:awq|gptq|gptqmodel|bnb|unsloth|quantized|dynamic|marlin|nf4|fp4|mxfp4|nvfp4|fp8|fp16|bf16"
    r"|int[48]|[48]-?bit|w\d+a\d+|g(?:32|64|128)|128g))+$"
)
"""How its weights are stored, as names end: Llama-3.1-8B-Instruct-AWQ-INT4, llama-3-8b-bnb-4bit."""
_LONGEST_FORM = 64
"""Characters of a name's end that are looked at: names come from anyone, and a search takes their square."""


def model_in(name: str) -> str:
    """Of a path or a Hugging Face name what names the model itself.

    Without the owner, how its weights are stored, and regard to upper and lower case: adapters are trained on a copy in
    four bits and served on the model, or the other way round.
    """
    last = name.rstrip("/").rpartition("/")[2].casefold()
    form = _FORM.search(last, max(0, len(last) - _LONGEST_FORM))
    return last[: form.start()] or last if form else last


def is_base_name(name: str, base_names: Iterable[str]) -> bool:
    return model_in(name) in map(model_in, base_names)

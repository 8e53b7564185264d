"""How a model's own files say to turn hidden states into an embedding: those of sentence-transformers."""

from typing import Any, NamedTuple

from loraserve.engine.request import Pooling
from loraserve.models import loader

COMPUTED_MODULES = {"Transformer", "Pooling", "Normalize"}
"""The sentence-transformers modules that /v1/embeddings computes."""
UNCOMPUTED_NOTE = (
    "the model's modules.json has unsupported modules ({}): requests to /v1/embeddings must set 'pooling', and their "
    "vectors leave these modules out"
)
POOLING_MODES = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_mean": Pooling.MEAN,
}
"""Only one may be set: several would be concatenated."""


class PoolingDefaults(NamedTuple):
    pooling: Pooling | None
    """None = the engine does not compute what the files specify."""
    notes: list[str]
    """For the person who started the server."""


def pooling_defaults(model: str, revision: str | None) -> PoolingDefaults:
    """model: a directory, or a name in the Hugging Face cache."""
    uncomputed = _uncomputed(loader.load_json(model, "modules.json", revision))
    if uncomputed:
        return PoolingDefaults(None, [UNCOMPUTED_NOTE.format(", ".join(uncomputed))])
    return PoolingDefaults(_pooling(loader.load_json(model, "1_Pooling/config.json", revision)), [])


def _uncomputed(modules: Any) -> list[str]:
    kinds = [module.get("type") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    names = [kind.rpartition(".")[2] for kind in kinds if isinstance(kind, str)]
    return [name for name in names if name not in COMPUTED_MODULES]


def _pooling(config: Any) -> Pooling | None:
    if config is None:
        return Pooling.LAST
    if not isinstance(config, dict):
        return None
    modes = {name for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on is True}
    if isinstance(config.get("pooling_mode"), str):
        modes.add(f"pooling_mode_{config['pooling_mode']}")
    return POOLING_MODES.get(modes.pop()) if len(modes) == 1 else None

"""Fields that identify a response."""

import time
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from loraserve.api.inference.chunks import ChunkHead
from loraserve.engine.model_description import ModelDescription


@lru_cache(maxsize=1)
def server_version() -> str:
    try:
        return version("loraserve")
    except PackageNotFoundError:
        return "0.0.0"


def system_fingerprint(model: ModelDescription) -> str:
    """Stable for one version of the server with one base model and one quantization."""
    form = "" if model.quantization == "none" else f"-{model.quantization}"
    return f"loraserve-{server_version()}-{model.layout.fingerprint[:8]}{form}"


def response_head(prefix: str, kind: str, name: str, request_id: str, fingerprint: str) -> ChunkHead:
    """prefix: the id's, such as "cmpl-"."""
    return ChunkHead(f"{prefix}{request_id}", kind, int(time.time()), name, fingerprint)

"""/v1/embeddings."""

from typing import Annotated

import msgspec
from msgspec import Meta

from loraserve.api.schemas.inputs import InputFields
from loraserve.engine.request import Pooling

ENCODINGS = ("float", "base64")


class EmbeddingRequest(InputFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names and meaning as in OpenAI's API and vLLM's extensions of it."""

    encoding_format: Annotated[str, Meta(extra_json_schema={"enum": [*ENCODINGS]})] | None = None
    """Numbers, or base64 of little-endian float32."""
    dimensions: int | None = None
    """Only the vector's first ones, for models and adapters that were trained so (Matryoshka)."""
    pooling: Annotated[str, Meta(extra_json_schema={"enum": [*Pooling]})] | None = None
    """The last hidden state of an input's last token, or the mean of all of its tokens'. Default: what the model's
    `1_Pooling/config.json` says, else "last"."""
    normalize: bool | None = None
    """To a Euclidean length of 1. Default: true."""


class Embedding(msgspec.Struct, frozen=True):
    object: str
    index: int
    embedding: list[float] | str
    """A text where base64 is asked for."""


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, frozen=True):
    object: str
    data: list[Embedding]
    """In the order of the inputs."""
    model: str
    usage: EmbeddingUsage

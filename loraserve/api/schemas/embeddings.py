"""/v1/embeddings."""

from typing import Annotated

import msgspec
from msgspec import Meta

from loraserve.api.schemas.inputs import InputFields
from loraserve.engine.request import Pooling

ENCODINGS = ("float", "base64")


class EmbeddingRequest(InputFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field names and meanings as in OpenAI's API and vLLM's extensions of it."""

    encoding_format: Annotated[str, Meta(extra_json_schema={"enum": [*ENCODINGS]})] | None = None
    """ "float": a list of numbers (the default). "base64": base64 of little-endian float32."""
    dimensions: int | None = None
    """Return only this many leading components, 1 to the model's hidden size, for models and adapters trained for it
    (Matryoshka). Default: all."""
    pooling: Annotated[str, Meta(extra_json_schema={"enum": [*Pooling]})] | None = None
    """ "last": the last hidden state of the input's last token. "mean": the mean over all its tokens. Default: as in
    the model's `1_Pooling/config.json`, else "last"."""
    normalize: bool | None = None
    """Scale each vector to Euclidean length 1. Default: true."""


class Embedding(msgspec.Struct, frozen=True):
    object: str
    index: int
    """Position of the input in the request."""
    embedding: list[float] | str
    """A string if `encoding_format` is "base64"."""


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, frozen=True):
    object: str
    data: list[Embedding]
    """In the order of the inputs."""
    model: str
    usage: EmbeddingUsage

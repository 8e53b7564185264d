"""POST /v1/embeddings."""

from array import array
from base64 import b64encode
from functools import partial
from typing import cast

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.ranges import check_one_of, check_range
from loraserve.api.inference.pooled_inputs import given_inputs
from loraserve.api.openapi.document import answered_with
from loraserve.api.routes.inference_post import inference_post
from loraserve.api.routes.pooled import VectorKind, answer_with_vectors
from loraserve.api.schemas.embeddings import ENCODINGS, Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage
from loraserve.control.requests.running import Route
from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import Pooling, PoolingParams
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.generation import Generation

DECODER = msgspec.json.Decoder(EmbeddingRequest, strict=True)
_post = inference_post(EmbeddingRequest, answered_with(EmbeddingResponse, may_stream=False))


@_post("/v1/embeddings")
async def create_embeddings(request: Request, context: NamedDependency[AppContext]) -> Response[EmbeddingResponse]:
    """One vector per input: the last hidden states of the base model or of an adapter, pooled."""
    return await _embed(request, context, None)


@_post("/adapters/{adapter:str}/v1/embeddings")
async def create_adapter_embeddings(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> Response[EmbeddingResponse]:
    """As POST /v1/embeddings, for the adapter in the path. `model` may be left out; if sent, it must name the same
    adapter."""
    return await _embed(request, context, adapter)


async def _embed(request: Request, context: AppContext, path_adapter: str | None) -> Response[EmbeddingResponse]:
    body = await decode_body(request, DECODER)

    def kind_of(_: object) -> VectorKind:
        if body.encoding_format is not None:
            check_one_of("encoding_format", body.encoding_format, ENCODINGS)
        model = context.runtime.engine.model
        pooling = _pooling(body, model)
        remedy = "Send fewer at once, or lower 'dimensions'."
        return VectorKind(pooling, pooling.dimensions or model.hidden_size, remedy)

    return await answer_with_vectors(
        request,
        context,
        body,
        path_adapter,
        Route.EMBEDDINGS,
        partial(given_inputs, body),
        kind_of,
        lambda name, _, generation: _response(name, generation, body.encoding_format),
    )


def _pooling(body: EmbeddingRequest, model: ModelDescription) -> PoolingParams:
    if body.dimensions is not None:
        check_range("dimensions", body.dimensions, 1, model.hidden_size)
    if body.pooling is not None:
        check_one_of("pooling", body.pooling, [*Pooling])
    pooling = model.default_pooling if body.pooling is None else Pooling(body.pooling)
    if pooling is None:
        message = (
            "The model's modules.json or 1_Pooling/config.json requires something that this server does not support. "
            "Send 'pooling'."
        )
        raise ServingError(ErrorCode.MISSING_PARAMETER, message, param="pooling")
    return PoolingParams(pooling, body.dimensions, normalize=body.normalize is not False)


def _response(name: str, generation: Generation, encoding_format: str | None) -> EmbeddingResponse:
    encode = _as_base64 if encoding_format == "base64" else _as_numbers
    data = [Embedding("embedding", prompt.index, encode(prompt.vector)) for prompt in generation.prompts]
    num_tokens = generation.usage().num_prompt_tokens
    return EmbeddingResponse("list", data, name, EmbeddingUsage(num_tokens, num_tokens))


def _as_base64(vector: bytes) -> str:
    return b64encode(vector).decode()


def _as_numbers(vector: bytes) -> list[float]:
    """Already encoded: as Python numbers, the values of a whole request would take 32 bytes each."""
    return cast(list[float], msgspec.Raw(msgspec.json.encode(array("f", vector).tolist())))

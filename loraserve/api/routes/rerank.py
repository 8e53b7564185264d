"""POST /v1/rerank, as in Cohere's and Jina's APIs; in vLLM, /rerank."""

from array import array
from functools import partial

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import UNSET

from loraserve.api.app_context import AppContext
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.request_id import request_id_of
from loraserve.api.inference.call import InferenceCall
from loraserve.api.inference.pairs import pair_inputs
from loraserve.api.openapi.document import answered_with
from loraserve.api.routes.inference_post import inference_post
from loraserve.api.routes.pooled import answer_with_vectors, score_kind, score_of
from loraserve.api.schemas.rerank import RankedDocument, RerankRequest, RerankResponse, RerankResult
from loraserve.api.schemas.usage import usage_of
from loraserve.control.requests.running import Route
from loraserve.serving.errors import invalid_value
from loraserve.serving.generation import Generation

DECODER = msgspec.json.Decoder(RerankRequest, strict=True)
_post = inference_post(RerankRequest, answered_with(RerankResponse, may_stream=False))


@_post(["/v1/rerank", "/v2/rerank", "/rerank"])
async def rerank(request: Request, context: NamedDependency[AppContext]) -> Response[RerankResponse]:
    """Order documents by their relevance to a query, judged by a reranker: a classifier with one label."""
    return await _rerank(request, context, None)


@_post(["/adapters/{adapter:str}/v1/rerank", "/adapters/{adapter:str}/v2/rerank", "/adapters/{adapter:str}/rerank"])
async def rerank_with_adapter(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> Response[RerankResponse]:
    """As POST /v1/rerank, for the adapter in the path. `model` may be left out; if sent, it must name the same
    adapter."""
    return await _rerank(request, context, adapter)


async def _rerank(request: Request, context: AppContext, path_adapter: str | None) -> Response[RerankResponse]:
    body = await decode_body(request, DECODER)
    documents = [given if isinstance(given, str) else given.text for given in body.documents]
    if body.top_n is not None and body.top_n < 0:
        raise invalid_value("top_n", f"is {body.top_n}; it must not be negative.")

    def response(name: str, call: InferenceCall, generation: Generation) -> RerankResponse:
        # By the head's numbers, because probabilities near 1 may be equal.
        ranked = sorted(generation.prompts, key=lambda prompt: -array("f", prompt.vector)[0])[: body.top_n or None]
        results = [
            RerankResult(
                prompt.index,
                score_of(body, call.adapter, prompt.vector),
                UNSET if body.return_documents is False else RankedDocument(documents[prompt.index]),
            )
            for prompt in ranked
        ]
        answer_id = f"rerank-{request_id_of(request.scope)}"
        return RerankResponse(answer_id, name, results, usage_of(generation.usage()))

    return await answer_with_vectors(
        request,
        context,
        body,
        path_adapter,
        Route.RERANK,
        partial(pair_inputs, {"query": [body.query]}, {"documents": documents}, body),
        score_kind,
        response,
    )

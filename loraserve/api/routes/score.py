"""POST /v1/score; in vLLM, /score."""

import time
from functools import partial

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.request_id import request_id_of
from loraserve.api.inference.call import InferenceCall
from loraserve.api.inference.pairs import pair_inputs
from loraserve.api.openapi.document import answered_with
from loraserve.api.routes.inference_post import inference_post
from loraserve.api.routes.pooled import answer_with_vectors, score_kind, score_of
from loraserve.api.schemas.score import Score, ScoreRequest, ScoreResponse
from loraserve.api.schemas.usage import usage_of
from loraserve.control.requests.running import Route
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.generation import Generation

DECODER = msgspec.json.Decoder(ScoreRequest, strict=True)
_post = inference_post(ScoreRequest, answered_with(ScoreResponse, may_stream=False))


@_post(["/v1/score", "/score"])
async def score(request: Request, context: NamedDependency[AppContext]) -> Response[ScoreResponse]:
    """The relevance of each document to its query, judged by a reranker: a classifier with one label."""
    return await _score(request, context, None)


@_post(["/adapters/{adapter:str}/v1/score", "/adapters/{adapter:str}/score"])
async def score_with_adapter(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> Response[ScoreResponse]:
    """As POST /v1/score, for the adapter in the path. `model` may be left out; if sent, it must name the same
    adapter."""
    return await _score(request, context, adapter)


async def _score(request: Request, context: AppContext, path_adapter: str | None) -> Response[ScoreResponse]:
    body = await decode_body(request, DECODER)

    def response(name: str, call: InferenceCall, generation: Generation) -> ScoreResponse:
        data = [
            Score(prompt.index, "score", score_of(body, call.adapter, prompt.vector)) for prompt in generation.prompts
        ]
        answer_id = f"score-{request_id_of(request.scope)}"
        return ScoreResponse(answer_id, "list", int(time.time()), name, data, usage_of(generation.usage()))

    return await answer_with_vectors(
        request,
        context,
        body,
        path_adapter,
        Route.SCORE,
        partial(pair_inputs, _given(body, "queries", "text_1"), _given(body, "documents", "text_2"), body),
        score_kind,
        response,
    )


def _given(body: ScoreRequest, *names: str) -> dict[str, list[str]]:
    """The field that is set, by its name. Raises `ServingError` unless exactly one is."""
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if not given:
        raise ServingError(ErrorCode.MISSING_PARAMETER, f"Missing required parameter: '{names[0]}'.", param=names[0])
    if len(given) > 1:
        message = f"'{names[0]}' and '{names[1]}' mean the same: send only one of them."
        raise ServingError(ErrorCode.INVALID_VALUE, message, param=names[1])
    return {name: [value] if isinstance(value, str) else value for name, value in given.items()}

"""POST /v1/classify; in vLLM, /classify."""

import time
from array import array
from functools import partial
from typing import cast

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.request_id import request_id_of
from loraserve.api.inference.classifiers import activation_of, classifier_of
from loraserve.api.inference.pooled_inputs import given_inputs
from loraserve.api.openapi.document import answered_with
from loraserve.api.routes.inference_post import inference_post
from loraserve.api.routes.pooled import VectorKind, answer_with_vectors
from loraserve.api.schemas.classify import Classification, ClassifyRequest, ClassifyResponse
from loraserve.api.schemas.usage import usage_of
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.control.requests.running import Route
from loraserve.engine.request import LabelActivation, to_classify
from loraserve.serving.generation import Generation, PromptRun
from loraserve.store.records import ClassifierRecord

DECODER = msgspec.json.Decoder(ClassifyRequest, strict=True)
_post = inference_post(ClassifyRequest, answered_with(ClassifyResponse, may_stream=False))


@_post(["/v1/classify", "/classify"])
async def classify(request: Request, context: NamedDependency[AppContext]) -> Response[ClassifyResponse]:
    """Classify each input with a classifier, an adapter that has a head of its own."""
    return await _classify(request, context, None)


@_post("/adapters/{adapter:str}/v1/classify")
async def classify_with_adapter(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> Response[ClassifyResponse]:
    """As POST /v1/classify, for the adapter in the path. `model` may be left out; if sent, it must name the same
    adapter."""
    return await _classify(request, context, adapter)


async def _classify(request: Request, context: AppContext, path_adapter: str | None) -> Response[ClassifyResponse]:
    body = await decode_body(request, DECODER)

    def kind_of(adapter: ResolvedAdapter | None) -> VectorKind:
        classifier = classifier_of(adapter)
        activation = LabelActivation.NONE if body.use_activation is False else activation_of(classifier)
        return VectorKind(to_classify(activation), classifier.num_labels, "Send fewer at once.")

    def response(name: str, adapter: ResolvedAdapter | None, generation: Generation) -> ClassifyResponse:
        classifier = classifier_of(adapter)
        data = [_classification(prompt, classifier) for prompt in generation.prompts]
        answer_id = f"classify-{request_id_of(request.scope)}"
        return ClassifyResponse(answer_id, "list", int(time.time()), name, data, usage_of(generation.usage()))

    return await answer_with_vectors(
        request,
        context,
        body,
        path_adapter,
        Route.CLASSIFY,
        partial(given_inputs, body),
        kind_of,
        lambda name, call, generation: response(name, call.adapter, generation),
    )


def _classification(prompt: PromptRun, classifier: ClassifierRecord) -> Classification:
    numbers = array("f", prompt.vector)
    label = numbers.index(max(numbers))
    # Already encoded: as Python numbers, the values of a whole request would take 32 bytes each.
    probs = cast(list[float], msgspec.Raw(msgspec.json.encode(numbers.tolist())))
    return Classification(prompt.index, classifier.name_of(label), probs, len(numbers))

"""Requests that are answered with one vector per input: embeddings, and the outputs of classifiers."""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from litestar import Request, Response

from loraserve.api.app_context import AppContext
from loraserve.api.inference.call import InferenceCall
from loraserve.api.inference.classifiers import activation_of, reranker_of
from loraserve.api.inference.common_fields import checked_fields
from loraserve.api.inference.pooled_inputs import PooledInputs
from loraserve.api.inference.respond import respond_complete
from loraserve.api.schemas.inputs import PairFields, PooledFields
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.control.requests.admission import reserve_tokens
from loraserve.control.requests.running import Demand, Route, RouteInfo
from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import LabelActivation, PoolingParams, SamplingParams, to_classify
from loraserve.serving.errors import invalid_value
from loraserve.serving.generation import Generation, Prompt
from loraserve.serving.settings import RequestLimits
from loraserve.serving.text.choice import TextOptions

MAX_AT_ONCE = 64
"""Inputs of one request in the engine at once. More would not finish sooner, and would fill the queue for others."""

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class VectorKind:
    """The vector that a model or adapter computes for an input."""

    pooling: PoolingParams
    num_values: int
    """Length of one vector."""
    remedy: str
    """Advice for a request whose vectors have too many values in total."""


async def answer_with_vectors(
    request: Request[Any, Any, Any],
    context: AppContext,
    body: PooledFields,
    path_adapter: str | None,
    route: Route,
    read_inputs: Callable[[ResolvedAdapter | None, ModelDescription, RequestLimits], PooledInputs],
    kind_of: Callable[[ResolvedAdapter | None], VectorKind],
    write: Callable[[str, InferenceCall, Generation], A],
) -> Response[A]:
    """read_inputs, kind_of: raise `ServingError`; kind_of does if the adapter computes no such vector. write: makes the
    body from the model's name as requested, the call and the generation."""
    runtime, model = context.runtime, context.runtime.engine.model
    target = await context.calls.resolve(request, body.model, path_adapter, body.user)
    fields, kind = checked_fields(body), kind_of(target.adapter)
    limits = runtime.settings.limits
    inputs = read_inputs(target.adapter, model, limits)
    _check_num_values(inputs, kind, limits)
    num_at_once = min(inputs.num_inputs, MAX_AT_ONCE, model.max_num_seqs)
    demand = Demand(reserve_tokens(inputs.num_bytes, 0), num_at_once, RouteInfo(route))
    async with context.calls.admit(request, target, demand) as call:
        if call.adapter != target.adapter:
            kind = kind_of(call.adapter)
            _check_num_values(inputs, kind, limits)
        token_ids = await inputs.token_ids(call.adapter, runtime.tokenizer)
        prompts = [Prompt(prompt, SamplingParams(max_tokens=1), pooling=kind.pooling) for prompt in token_ids]
        text = TextOptions(frozenset())
        generation = await call.start(prompts, text, fields, max_prompts_at_once=num_at_once)
        return await respond_complete(
            request,
            runtime,
            call,
            generation,
            lambda _: write(target.name, call, generation),
            more_size=inputs.num_inputs * kind.num_values,
        )


def score_kind(adapter: ResolvedAdapter | None) -> VectorKind:
    """One number, as the reranker's head computes it. Raises `ServingError` if the adapter is not a reranker."""
    reranker_of(adapter)
    return VectorKind(to_classify(LabelActivation.NONE), 1, "")


def score_of(body: PairFields, adapter: ResolvedAdapter | None, vector: bytes) -> float:
    """A reranker's score, from the vector it answered with. Computed in float64, in which very large numbers still
    differ."""
    number = array("f", vector)[0]
    activation = LabelActivation.NONE if body.use_activation is False else activation_of(reranker_of(adapter))
    if activation is LabelActivation.NONE:
        return number
    power = math.exp(-abs(number))
    return (1 if number >= 0 else power) / (1 + power)


def _check_num_values(inputs: PooledInputs, kind: VectorKind, limits: RequestLimits) -> None:
    num_values = inputs.num_inputs * kind.num_values
    if num_values > limits.max_pooled_values:
        message = f"would be answered with {num_values} numbers; the limit is {limits.max_pooled_values}. {kind.remedy}"
        raise invalid_value(inputs.param, message)

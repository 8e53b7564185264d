"""POST /v1/embeddings."""

from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import cast

import msgspec
from litestar import Request, Response, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.needs import INFERENCE
from loraserve.api.http.ranges import check_one_of, check_range
from loraserve.api.inference.call import Demand
from loraserve.api.inference.common_fields import check_priority, checked_salt
from loraserve.api.inference.prompts import prompt_bytes, split_prompts, truncate_around
from loraserve.api.inference.respond import respond_whole
from loraserve.api.openapi.document import answered_with, json_body
from loraserve.api.schemas.embeddings import ENCODINGS, Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage
from loraserve.control.requests.admission import reserve_tokens
from loraserve.control.requests.running import Asked, Route
from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import Pooling, PoolingParams, SamplingParams
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.serving.generation import Generation, Prompt
from loraserve.serving.settings import Limits
from loraserve.serving.text.choice import TextOptions
from loraserve.serving.text.tokenizer import TextTokenizer

MAX_AT_ONCE = 64
"""Inputs of one request in the engine: more would not be computed sooner, and others would be told of a full queue."""
DECODER = msgspec.json.Decoder(EmbeddingRequest, strict=True)
OPERATION = json_body(EmbeddingRequest)
RESPONSES = answered_with(EmbeddingResponse, may_stream=False)


@post(
    "/v1/embeddings",
    opt=INFERENCE,
    status_code=200,
    operation_class=OPERATION,
    responses=RESPONSES,
    tags=["inference"],
)
async def create_embeddings(request: Request, context: NamedDependency[AppContext]) -> Response[EmbeddingResponse]:
    """One vector for each input: the last hidden states of the base model or of an adapter, pooled."""
    return await _embed(request, context, None)


@post(
    "/adapters/{adapter:str}/v1/embeddings",
    opt=INFERENCE,
    status_code=200,
    operation_class=OPERATION,
    responses=RESPONSES,
    tags=["inference"],
)
async def create_adapter_embeddings(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> Response[EmbeddingResponse]:
    return await _embed(request, context, adapter)


async def _embed(request: Request, context: AppContext, path_adapter: str | None) -> Response[EmbeddingResponse]:
    asked = await decode_body(request, DECODER)
    runtime = context.runtime
    runtime.lifecycle.check_open()
    principal, model = principal_of(request), runtime.engine.model
    target = await context.control.resolver.resolve(principal, asked.model, path_adapter=path_adapter, user=asked.user)
    check_priority(asked.priority)
    if asked.encoding_format is not None:
        check_one_of("encoding_format", asked.encoding_format, ENCODINGS)
    cache_salt, pooling = checked_salt(asked.cache_salt), _pooling(asked, model)
    given = split_prompts("input", asked.input, runtime.settings.limits.max_inputs, model.vocab_size)
    num_values = _num_values(len(given), pooling, model, runtime.settings.limits)
    num_at_once = min(len(given), MAX_AT_ONCE, model.max_num_seqs)
    demand = Demand(reserve_tokens(sum(map(prompt_bytes, given)), 0), num_at_once, Asked(Route.EMBEDDINGS))
    async with context.calls.admit(principal, target, request.scope, demand) as call:
        inputs = await _token_ids(asked, given, model, runtime.tokenizer)
        prompts = [Prompt(token_ids, SamplingParams(max_tokens=1), pooling=pooling) for token_ids in inputs]
        text = TextOptions(frozenset())
        generation = await call.start(prompts, text, cache_salt, max_prompts_at_once=num_at_once)
        return await respond_whole(
            request,
            runtime,
            call,
            generation,
            lambda _: _response(target.name, generation, asked.encoding_format),
            more_size=num_values,
        )


def _pooling(asked: EmbeddingRequest, model: ModelDescription) -> PoolingParams:
    if asked.dimensions is not None:
        check_range("dimensions", asked.dimensions, 1, model.hidden_size)
    if asked.pooling is not None:
        check_one_of("pooling", asked.pooling, [*Pooling])
    pooling = model.default_pooling if asked.pooling is None else Pooling(asked.pooling)
    if pooling is None:
        message = (
            "The model's modules.json or 1_Pooling/config.json asks for what this server does not have. Send 'pooling'."
        )
        raise ServingError(ErrorCode.MISSING_PARAMETER, message, param="pooling")
    return PoolingParams(pooling, asked.dimensions, normalize=asked.normalize is not False)


def _num_values(num_inputs: int, pooling: PoolingParams, model: ModelDescription, limits: Limits) -> int:
    """Of all vectors. Raises `ServingError` where they are too many."""
    num_values = num_inputs * (pooling.dimensions or model.hidden_size)
    if num_values > limits.max_embedding_values:
        message = f"would be answered by {num_values} numbers; the limit is {limits.max_embedding_values}."
        raise invalid_value("input", f"{message} Send fewer at once, or lower 'dimensions'.")
    return num_values


async def _token_ids(
    asked: EmbeddingRequest, given: Sequence[str | list[int]], model: ModelDescription, tokenizer: TextTokenizer
) -> list[list[int]]:
    limit, add_special_tokens = asked.truncate_prompt_tokens, asked.add_special_tokens is not False
    if limit is not None and limit != -1:
        check_range("truncate_prompt_tokens", limit, 1, model.max_model_len)
    longest = model.max_model_len if limit in (None, -1) else limit
    if isinstance(given[0], str):
        texts = cast(Sequence[str], given)
        inputs = await tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
        too_long = [index for index, token_ids in enumerate(inputs) if len(token_ids) > longest]
        if limit is not None and too_long:
            bare = await tokenizer.encode_all([texts[index] for index in too_long], add_special_tokens=False)
            for index, token_ids in zip(too_long, bare, strict=True):
                inputs[index] = truncate_around(inputs[index], token_ids, longest)
    else:
        inputs = cast(list[list[int]], given)
        if limit is not None:
            inputs = [token_ids[:longest] for token_ids in inputs]
    for index, token_ids in enumerate(inputs):
        which = "input" if len(inputs) == 1 else f"input[{index}]"
        if not token_ids:
            raise ServingError(ErrorCode.INVALID_VALUE, f"'{which}' has no tokens.", param="input")
        if len(token_ids) > longest:
            message = f"This model's maximum context length is {longest} tokens, but '{which}' has {len(token_ids)}."
            message += " Shorten it, or send 'truncate_prompt_tokens': -1."
            raise ServingError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param="input")
    return inputs


def _response(name: str, generation: Generation, encoding_format: str | None) -> EmbeddingResponse:
    encode = _as_base64 if encoding_format == "base64" else _as_numbers
    data = [Embedding("embedding", prompt.index, encode(prompt.vector)) for prompt in generation.prompts]
    num_tokens = generation.usage().num_prompt_tokens
    return EmbeddingResponse("list", data, name, EmbeddingUsage(num_tokens, num_tokens))


def _as_base64(vector: bytes) -> str:
    return b64encode(vector).decode()


def _as_numbers(vector: bytes) -> list[float]:
    """Written down already: as Python's numbers, all of a request's at once would take 32 bytes each."""
    return cast(list[float], msgspec.Raw(msgspec.json.encode(array("f", vector).tolist())))

"""Requests that are answered by a vector for each input: embeddings, and the labels' numbers of classifiers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from litestar import Request, Response

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.ranges import check_range
from loraserve.api.inference.call import Demand, InferenceCall
from loraserve.api.inference.common_fields import check_priority, checked_salt
from loraserve.api.inference.prompts import prompt_bytes, split_prompts, truncate_around
from loraserve.api.inference.respond import respond_whole
from loraserve.api.schemas.inputs import InputFields
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.control.requests.admission import reserve_tokens
from loraserve.control.requests.running import Asked, Route
from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import PoolingParams, SamplingParams
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.serving.generation import Generation, Prompt
from loraserve.serving.settings import Limits
from loraserve.serving.text.choice import TextOptions
from loraserve.serving.text.tokenizer import TextTokenizer

MAX_AT_ONCE = 64
"""Inputs of one request in the engine: more would not be computed sooner, and others would be told of a full queue."""

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class VectorKind:
    """What an adapter makes of an input."""

    pooling: PoolingParams
    num_values: int
    """Of one vector."""
    remedy: str
    """Where all vectors of a request have too many values."""


async def answer_with_vectors(
    request: Request[Any, Any, Any],
    context: AppContext,
    asked: InputFields,
    path_adapter: str | None,
    route: Route,
    kind_of: Callable[[ResolvedAdapter | None], VectorKind],
    write: Callable[[str, InferenceCall, Generation], A],
) -> Response[A]:
    """kind_of: raises `ServingError` where the adapter has none. write: makes the body, from the model's name as it was
    asked for and what was generated."""
    runtime = context.runtime
    runtime.lifecycle.check_open()
    principal, model = principal_of(request), runtime.engine.model
    target = await context.control.resolver.resolve(principal, asked.model, path_adapter=path_adapter, user=asked.user)
    check_priority(asked.priority)
    cache_salt, kind = checked_salt(asked.cache_salt), kind_of(target.adapter)
    limits = runtime.settings.limits
    given = split_prompts("input", asked.input, limits.max_inputs, model.vocab_size)
    _check_num_values(len(given), kind, limits)
    num_at_once = min(len(given), MAX_AT_ONCE, model.max_num_seqs)
    demand = Demand(reserve_tokens(sum(map(prompt_bytes, given)), 0), num_at_once, Asked(route))
    async with context.calls.admit(principal, target, request.scope, demand) as call:
        if call.adapter != target.adapter:
            kind = kind_of(call.adapter)
            _check_num_values(len(given), kind, limits)
        inputs = await _token_ids(asked, given, model, runtime.tokenizer)
        prompts = [Prompt(token_ids, SamplingParams(max_tokens=1), pooling=kind.pooling) for token_ids in inputs]
        text = TextOptions(frozenset())
        generation = await call.start(prompts, text, cache_salt, max_prompts_at_once=num_at_once)
        return await respond_whole(
            request,
            runtime,
            call,
            generation,
            lambda _: write(target.name, call, generation),
            more_size=len(given) * kind.num_values,
        )


def _check_num_values(num_inputs: int, kind: VectorKind, limits: Limits) -> None:
    num_values = num_inputs * kind.num_values
    if num_values > limits.max_pooled_values:
        message = f"would be answered by {num_values} numbers; the limit is {limits.max_pooled_values}. {kind.remedy}"
        raise invalid_value("input", message)


async def _token_ids(
    asked: InputFields, given: Sequence[str | list[int]], model: ModelDescription, tokenizer: TextTokenizer
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

"""POST /v1/completions."""

import itertools
from collections.abc import Sequence
from typing import cast

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.event_stream import EventStream
from loraserve.api.http.ranges import unsupported
from loraserve.api.http.request_id import request_id_of
from loraserve.api.inference.completion_writer import CompletionOptions, CompletionWriter, EchoedPrompt
from loraserve.api.inference.identity import response_head
from loraserve.api.inference.prompts import (
    check_not_empty,
    check_prompt_logprobs,
    prompt_bytes,
    split_prompts,
    truncate,
)
from loraserve.api.inference.respond import respond
from loraserve.api.inference.sampling import CheckedSampling, check_context, prompt_sampling
from loraserve.api.openapi.document import answered_with
from loraserve.api.routes.inference_post import inference_post
from loraserve.api.schemas.completions import CompletionRequest, CompletionResponse
from loraserve.control.requests.admission import reserve_tokens
from loraserve.control.requests.running import Demand, Route, RouteInfo
from loraserve.serving.errors import invalid_value
from loraserve.serving.generation import Prompt
from loraserve.serving.text.tokenizer import TEXT_SIZE, TextTokenizer

DEFAULT_MAX_TOKENS = 16
DECODER = msgspec.json.Decoder(CompletionRequest, strict=True)
_post = inference_post(CompletionRequest, answered_with(CompletionResponse))


@_post("/v1/completions")
async def create_completion(
    request: Request, context: NamedDependency[AppContext]
) -> Response[CompletionResponse] | EventStream:
    """Continue one or more prompts, as OpenAI's completions."""
    return await _complete(request, context, None)


@_post("/adapters/{adapter:str}/v1/completions")
async def create_adapter_completion(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> Response[CompletionResponse] | EventStream:
    """As POST /v1/completions, for the adapter in the path. `model` may be left out; if sent, it must name the same
    adapter."""
    return await _complete(request, context, adapter)


async def _complete(
    request: Request, context: AppContext, path_adapter: str | None
) -> Response[CompletionResponse] | EventStream:
    body = await decode_body(request, DECODER)
    runtime, request_id = context.runtime, body.request_id or request_id_of(request.scope)
    target = await context.calls.resolve(request, body.model, path_adapter, body.safety_identifier or body.user)
    checked = _check(context, body)
    max_prompts, vocab_size = runtime.settings.limits.max_prompts, runtime.engine.model.vocab_size
    given = split_prompts("prompt", body.prompt, max_prompts, vocab_size)
    demand = _demand(body, given, checked)
    async with context.calls.admit(request, target, demand) as call:
        prompts = await _prompts(context, body, given, checked)
        generation = await call.start(prompts, checked.text, checked.fields)
        writer = CompletionWriter(
            response_head("cmpl-", "text_completion", target.name, request_id, context.fingerprint),
            CompletionOptions(
                n=checked.params.n,
                logprobs=body.logprobs,
                prompt_logprobs=body.prompt_logprobs,
                return_token_ids=bool(body.return_token_ids),
                tokens_as_ids=bool(body.return_tokens_as_token_ids),
                echo=await _echoes(context, body, given, prompts) if body.echo else None,
            ),
            runtime.tokenizer.token_text,
        )
        return await respond(request, runtime, call, generation, writer, body)


def _demand(body: CompletionRequest, prompts: Sequence[str | list[int]], checked: CheckedSampling) -> Demand:
    num_choices = len(prompts) * checked.params.n
    max_tokens = DEFAULT_MAX_TOKENS if checked.max_tokens is None else checked.max_tokens
    how = RouteInfo(Route.COMPLETIONS, bool(body.stream))
    return Demand(reserve_tokens(sum(map(prompt_bytes, prompts)), max_tokens, num_choices), num_choices, how)


def _check(context: AppContext, body: CompletionRequest) -> CheckedSampling:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", f"is {body.best_of}; only a value equal to 'n' is supported.")
    if body.logprobs is not None:
        context.sampling.check_top_logprobs("logprobs", body.logprobs)
    max_tokens = body.max_tokens
    if max_tokens is not None and max_tokens < 1 and not (max_tokens == 0 and body.echo):
        raise invalid_value("max_tokens", f"is {max_tokens}; it must be at least 1, or 0 with 'echo': true.")
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return context.sampling.check(body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)


async def _prompts(
    context: AppContext, body: CompletionRequest, given: Sequence[str | list[int]], checked: CheckedSampling
) -> list[Prompt]:
    model = context.runtime.engine.model
    if isinstance(given[0], str):
        texts, add_special_tokens = cast(Sequence[str], given), body.add_special_tokens is not False
        sequences = await context.runtime.tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
    else:
        sequences = cast(list[list[int]], given)
    prompts: list[Prompt] = []
    for sequence in sequences:
        token_ids = truncate(sequence, body.truncate_prompt_tokens, model.max_model_len, checked.max_tokens)
        check_not_empty("prompt", token_ids)
        # With max_tokens=0 the engine still generates one token, which is dropped.
        check_context(len(token_ids), checked.max_tokens, model.max_model_len, "prompt", "max_tokens")
        room = model.max_model_len - len(token_ids)
        max_tokens = min(DEFAULT_MAX_TOKENS, room) if checked.max_tokens is None else max(1, checked.max_tokens)
        prompts.append(Prompt(token_ids, prompt_sampling(checked, max_tokens)))
    if checked.params.prompt_logprobs is not None:
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        are_echoed = bool(body.echo) and body.logprobs is not None
        # Every choice returns them: in its `prompt_logprobs`, and again if its text begins with the prompt.
        num_answered = checked.params.n * (are_echoed + (body.prompt_logprobs is not None))
        top, limits = checked.params.prompt_logprobs, context.runtime.settings.limits
        check_prompt_logprobs(param, num_tokens, num_answered, top, limits)
    return prompts


async def _echoes(
    context: AppContext, body: CompletionRequest, given: Sequence[str | list[int]], prompts: list[Prompt]
) -> list[EchoedPrompt]:
    tokenizer = context.runtime.tokenizer
    sequences = [prompt.token_ids for prompt in prompts]
    if isinstance(given[0], str) and body.truncate_prompt_tokens is None:
        # The texts may spell out special tokens.
        texts, skip_special_tokens = cast(Sequence[str], given), False
    else:
        skip_special_tokens = body.skip_special_tokens
        texts = await tokenizer.decode_all(sequences, skip_special_tokens=skip_special_tokens)

    def echoes() -> list[EchoedPrompt]:
        return [
            EchoedPrompt(text, _text_offsets(tokenizer, token_ids, text, skip_special_tokens))
            for token_ids, text in zip(sequences, texts, strict=True)
        ]

    return await tokenizer.run(sum(map(len, sequences)) + TEXT_SIZE * len(sequences), echoes)


def _text_offsets(tokenizer: TextTokenizer, token_ids: list[int], text: str, skip_special_tokens: bool) -> list[int]:
    """Where each token begins in `text`."""
    detokenizer = tokenizer.detokenizer([], skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.step(token_id) for token_id in token_ids]
    # The tokenizer may add something before a text, such as a BOS token or a space, that the text itself does not have.
    whole = "".join(pieces)
    start = whole.find(text)
    num_added = start if start >= 0 else max(0, len(whole) - len(text))
    ends = itertools.accumulate(len(piece) for piece in pieces)
    return [max(0, end - len(piece) - num_added) for piece, end in zip(pieces, ends, strict=True)]

"""POST /v1/chat/completions."""

from typing import NamedTuple

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.chat.adapter_template import with_turn_ends
from loraserve.api.chat.conversations import conversation_of
from loraserve.api.chat.predictions import predicted_text
from loraserve.api.chat.prompts import conversation_demand, conversation_prompt, with_call_format
from loraserve.api.chat.reasoning import with_reasoning
from loraserve.api.chat.tools import ToolUse, tool_use
from loraserve.api.chat.writer import ChatOptions, ChatWriter
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.event_stream import EventStream
from loraserve.api.http.ranges import unsupported
from loraserve.api.http.request_id import request_id_of
from loraserve.api.inference.identity import response_head
from loraserve.api.inference.prompts import check_prompt_logprobs
from loraserve.api.inference.respond import respond
from loraserve.api.inference.sampling import CheckedSampling
from loraserve.api.openapi.document import answered_with
from loraserve.api.routes.inference_post import inference_post
from loraserve.api.schemas.chat import ChatCompletionRequest, ChatCompletionResponse
from loraserve.control.requests.running import Route
from loraserve.serving.errors import invalid_value

DECODER = msgspec.json.Decoder(ChatCompletionRequest, strict=True)
_post = inference_post(ChatCompletionRequest, answered_with(ChatCompletionResponse))


@_post("/v1/chat/completions")
async def create_chat_completion(
    request: Request, context: NamedDependency[AppContext]
) -> Response[ChatCompletionResponse] | EventStream:
    """Answer a conversation, as OpenAI's chat completions."""
    return await _chat(request, context, None)


@_post("/adapters/{adapter:str}/v1/chat/completions")
async def create_adapter_chat_completion(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> Response[ChatCompletionResponse] | EventStream:
    """As POST /v1/chat/completions, for the adapter in the path. `model` may be left out; if sent, it must name the
    same adapter."""
    return await _chat(request, context, adapter)


async def _chat(
    request: Request, context: AppContext, path_adapter: str | None
) -> Response[ChatCompletionResponse] | EventStream:
    body = await decode_body(request, DECODER)
    runtime, request_id = context.runtime, body.request_id or request_id_of(request.scope)
    target = await context.calls.resolve(request, body.model, path_adapter, body.safety_identifier or body.user)
    use = tool_use(body, runtime.settings)
    limit = _answer_limit(body)
    checked = _check(context, body, use, limit.max_tokens)
    predicted = predicted_text(body.prediction, runtime.engine.model)
    conversation = conversation_of(
        body,
        body.messages,
        use.tools,
        runtime.settings.limits,
        body.reasoning_effort,
        body.thinking_token_budget,
    )
    demand = conversation_demand(context, checked, conversation, Route.CHAT, body.stream)
    async with context.calls.admit(request, target, demand) as call:
        prompt = await conversation_prompt(context, body, checked, conversation, call.adapter, limit.param, predicted)
        if body.prompt_logprobs is not None:
            num_tokens, limits = len(prompt.token_ids), runtime.settings.limits
            check_prompt_logprobs("prompt_logprobs", num_tokens, 1, body.prompt_logprobs, limits)
        prompt, text = with_reasoning(runtime, call.adapter, conversation, prompt, checked.text)
        prompt, text = with_turn_ends(runtime, call.adapter, prompt, text)
        generation = await call.start([prompt], text, checked.fields)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        writer = ChatWriter(
            response_head("chatcmpl-", kind, target.name, request_id, context.fingerprint),
            ChatOptions(
                n=checked.params.n,
                top_logprobs=checked.params.logprobs,
                prompt_logprobs=body.prompt_logprobs,
                return_token_ids=bool(body.return_token_ids),
                tokens_as_ids=bool(body.return_tokens_as_token_ids),
                tool_use=use,
                has_reasoning=text.reasoning is not None,
                include_reasoning=body.include_reasoning,
            ),
            runtime.tokenizer.token_text,
        )
        return await respond(request, runtime, call, generation, writer, body)


def _check(context: AppContext, body: ChatCompletionRequest, use: ToolUse, max_tokens: int | None) -> CheckedSampling:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", f"is {body.best_of}; only a value equal to 'n' is supported.")
    if not body.include_reasoning and context.runtime.settings.reasoning_parser is None:
        raise unsupported("include_reasoning", "is false, which needs a server started with --reasoning-parser.")
    checked = context.sampling.check(
        body,
        max_tokens=max_tokens,
        logprobs=_logprobs(context, body),
        prompt_logprobs=body.prompt_logprobs,
        tool_schema=use.schema,
        calls=use.calls,
    )
    return with_call_format(checked, use)


class AnswerLimit(NamedTuple):
    param: str
    """The field that it was sent in."""
    max_tokens: int | None


def _answer_limit(body: ChatCompletionRequest) -> AnswerLimit:
    older, limit = body.max_tokens, AnswerLimit("max_completion_tokens", body.max_completion_tokens)
    if limit.max_tokens is None:
        limit = AnswerLimit("max_tokens", older)
    elif older not in (None, limit.max_tokens):
        raise invalid_value("max_completion_tokens", "differs from 'max_tokens', its older name.")
    if limit.max_tokens is not None and limit.max_tokens < 1:
        raise invalid_value(limit.param, f"is {limit.max_tokens}; it must be at least 1.")
    return limit


def _logprobs(context: AppContext, body: ChatCompletionRequest) -> int | None:
    if body.top_logprobs is not None:
        context.sampling.check_top_logprobs("top_logprobs", body.top_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise invalid_value("top_logprobs", "needs 'logprobs': true.")
    return (body.top_logprobs or 0) if body.logprobs else None

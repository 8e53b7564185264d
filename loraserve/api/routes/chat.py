"""POST /v1/chat/completions."""

from dataclasses import replace

import msgspec
from litestar import Request, Response, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.auth import principal_of
from loraserve.api.chat_writer import ChatOptions, ChatWriter
from loraserve.api.conversations import conversation_of
from loraserve.api.decoding import decode_body
from loraserve.api.event_stream import EventStream
from loraserve.api.identity import response_head
from loraserve.api.inference_call import Demand
from loraserve.api.needs import INFERENCE
from loraserve.api.openapi import answered_with, json_body
from loraserve.api.processing_time import received_s
from loraserve.api.prompts import check_not_empty, truncate
from loraserve.api.ranges import unsupported
from loraserve.api.request_id import own_request_id, request_id_of
from loraserve.api.respond import respond
from loraserve.api.sampling import CheckedSampling, check_context, prompt_sampling
from loraserve.api.schemas.chat import ChatCompletionRequest, ChatCompletionResponse
from loraserve.api.tools import ToolUse, tool_use
from loraserve.control.admission import reserve_tokens
from loraserve.control.running import Asked, Route
from loraserve.serving.conversation import Conversation
from loraserve.serving.errors import invalid_value
from loraserve.serving.generation import Prompt

DECODER = msgspec.json.Decoder(ChatCompletionRequest, strict=True)
OPERATION = json_body(ChatCompletionRequest)
RESPONSES = answered_with(ChatCompletionResponse)


@post(
    "/v1/chat/completions",
    opt=INFERENCE,
    status_code=200,
    operation_class=OPERATION,
    responses=RESPONSES,
    tags=["inference"],
)
async def create_chat_completion(
    request: Request, context: NamedDependency[AppContext]
) -> Response[ChatCompletionResponse] | EventStream:
    return await _chat(request, context, None)


@post(
    "/adapters/{adapter:str}/v1/chat/completions",
    opt=INFERENCE,
    status_code=200,
    operation_class=OPERATION,
    responses=RESPONSES,
    tags=["inference"],
)
async def create_adapter_chat_completion(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> Response[ChatCompletionResponse] | EventStream:
    return await _chat(request, context, adapter)


async def _chat(
    request: Request, context: AppContext, path_adapter: str | None
) -> Response[ChatCompletionResponse] | EventStream:
    asked = await decode_body(request, DECODER)
    runtime, request_id = context.runtime, asked.request_id or request_id_of(request.scope)
    runtime.lifecycle.check_open()
    principal = principal_of(request)
    target = await context.control.resolver.resolve(
        principal, asked.model, path_adapter=path_adapter, user=asked.safety_identifier or asked.user
    )
    use = tool_use(asked, runtime.settings)
    checked = _check(context, asked, use)
    conversation = conversation_of(asked, asked.messages, use.tools, runtime.settings.limits)
    demand, own_id = _demand(context, asked, checked, conversation), own_request_id(request.scope)
    async with context.calls.admit(principal, target, own_id, demand) as call:
        prompt = await _prompt(context, asked, checked, conversation)
        generation = await call.start([prompt], checked.text, received_s(request.scope), checked.cache_salt)
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        writer = ChatWriter(
            response_head("chatcmpl-", kind, target.name, request_id, context.fingerprint),
            ChatOptions(
                n=checked.params.n,
                top_logprobs=checked.params.logprobs,
                prompt_logprobs=asked.prompt_logprobs,
                return_token_ids=bool(asked.return_token_ids),
                tokens_as_ids=bool(asked.return_tokens_as_token_ids),
                tool_use=use,
            ),
            runtime.tokenizer.token_text,
        )
        return await respond(request, runtime, call, generation, writer, asked)


def _demand(
    context: AppContext, asked: ChatCompletionRequest, checked: CheckedSampling, conversation: Conversation
) -> Demand:
    max_tokens = checked.max_tokens or context.sampling.default_max_tokens(context.runtime.engine.model.max_model_len)
    how = Asked(Route.CHAT, bool(asked.stream))
    return Demand(reserve_tokens(conversation.num_chars, max_tokens, checked.params.n), checked.params.n, how)


def _check(context: AppContext, asked: ChatCompletionRequest, use: ToolUse) -> CheckedSampling:
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise unsupported("best_of", f"is {asked.best_of}; only the same as 'n' is supported.")
    checked = context.sampling.check(
        asked,
        max_tokens=_max_tokens(asked),
        logprobs=_logprobs(context, asked),
        prompt_logprobs=asked.prompt_logprobs,
        tool_schema=use.schema,
    )
    if use.call_format is None:
        return checked
    # What opens a call may be a special token.
    return replace(checked, text=replace(checked.text, skip_special_tokens=False))


def _max_tokens(asked: ChatCompletionRequest) -> int | None:
    given = {value for value in (asked.max_tokens, asked.max_completion_tokens) if value is not None}
    if len(given) > 1:
        raise invalid_value("max_completion_tokens", "differs from 'max_tokens', its older name.")
    if not given:
        return None
    max_tokens = given.pop()
    if max_tokens < 1:
        raise invalid_value("max_tokens", f"is {max_tokens}; it must be at least 1.")
    return max_tokens


def _logprobs(context: AppContext, asked: ChatCompletionRequest) -> int | None:
    if asked.top_logprobs is not None:
        context.sampling.check_top_logprobs("top_logprobs", asked.top_logprobs)
        if asked.top_logprobs and not asked.logprobs:
            raise invalid_value("top_logprobs", "needs 'logprobs': true.")
    return (asked.top_logprobs or 0) if asked.logprobs else None


async def _prompt(
    context: AppContext, asked: ChatCompletionRequest, checked: CheckedSampling, conversation: Conversation
) -> Prompt:
    model = context.runtime.engine.model
    token_ids = await context.runtime.tokenizer.encode_chat(
        conversation, add_special_tokens=bool(asked.add_special_tokens)
    )
    token_ids = truncate(token_ids, asked.truncate_prompt_tokens, model.max_model_len, checked.max_tokens)
    check_not_empty("messages", token_ids)
    check_context(len(token_ids), checked.max_tokens or 1, model.max_model_len)
    max_tokens = checked.max_tokens or context.sampling.default_max_tokens(model.max_model_len - len(token_ids))
    return Prompt(token_ids, prompt_sampling(checked, max_tokens))

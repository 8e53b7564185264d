"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API. Stateless."""

from functools import partial
from typing import TypeVar

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.chat.adapter_template import with_turn_ends
from loraserve.api.chat.prompts import conversation_demand
from loraserve.api.chat.reasoning import with_reasoning
from loraserve.api.http.auth import principal_of
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.event_stream import EventStream
from loraserve.api.http.request_id import request_id_of
from loraserve.api.inference.respond import open_stream, respond_complete
from loraserve.api.messages.errors import ANTHROPIC_ERRORS, REQUEST_ID
from loraserve.api.messages.kinds import refuse_kinds
from loraserve.api.messages.output import MessageOutput
from loraserve.api.messages.prompt import message_prompt, prompt_tokens
from loraserve.api.messages.request import checked_message, counted_conversation
from loraserve.api.messages.writer import MessageWriter
from loraserve.api.openapi.document import answered_with, message_error_responses
from loraserve.api.routes.inference_post import inference_post, text_post
from loraserve.api.schemas.message_answer import Message, TokenCount
from loraserve.api.schemas.messages import CountTokensRequest, MessagesRequest
from loraserve.control.requests.running import Route

R = TypeVar("R", bound=Response)

DECODER = msgspec.json.Decoder(MessagesRequest, strict=True)
COUNT_DECODER = msgspec.json.Decoder(CountTokensRequest, strict=True)
ERRORS = message_error_responses()
_post = inference_post(MessagesRequest, answered_with(Message, ERRORS))
_count_post = text_post(CountTokensRequest, ERRORS)


@_post("/v1/messages", exception_handlers=ANTHROPIC_ERRORS)
async def create_message(request: Request, context: NamedDependency[AppContext]) -> Response[Message] | EventStream:
    """Answer a conversation, as Anthropic's Messages API. Stateless: to continue, send all messages so far."""
    return _identified(request, await _answer(request, context, None))


@_post("/adapters/{adapter:str}/v1/messages", exception_handlers=ANTHROPIC_ERRORS)
async def create_adapter_message(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> Response[Message] | EventStream:
    """As POST /v1/messages, for the adapter in the path. `model` may be left out; if sent, it must name the same
    adapter."""
    return _identified(request, await _answer(request, context, adapter))


@_count_post("/v1/messages/count_tokens", exception_handlers=ANTHROPIC_ERRORS)
async def count_tokens(request: Request, context: NamedDependency[AppContext]) -> Response[TokenCount]:
    """Count the tokens in the prompt of a message."""
    return _identified(request, Response(await _count(request, context, None)))


@_count_post("/adapters/{adapter:str}/v1/messages/count_tokens", exception_handlers=ANTHROPIC_ERRORS)
async def count_adapter_tokens(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> Response[TokenCount]:
    """As POST /v1/messages/count_tokens, for the adapter in the path. `model` may be left out; if sent, it must name
    the same adapter."""
    return _identified(request, Response(await _count(request, context, adapter)))


async def _answer(request: Request, context: AppContext, path_adapter: str | None) -> Response[Message] | EventStream:
    body = await decode_body(request, DECODER, refuse_kinds)
    runtime, request_id = context.runtime, body.request_id or request_id_of(request.scope)
    user = body.safety_identifier or body.user or (body.metadata and body.metadata.user_id)
    target = await context.calls.resolve(request, body.model, path_adapter, user)
    checked = checked_message(body, context.sampling, runtime.settings)
    sampling, conversation = checked.sampling, checked.conversation
    demand = conversation_demand(context, sampling, conversation, Route.MESSAGES, body.stream)
    async with context.calls.admit(request, target, demand) as call:
        found = await message_prompt(context, body, sampling, conversation, call.adapter)
        prompt, text = with_reasoning(runtime, call.adapter, conversation, found.prompt, sampling.text)
        prompt, text = with_turn_ends(runtime, call.adapter, prompt, text)
        generation = await call.start([prompt], text, sampling.fields)
        max_depth = runtime.settings.limits.max_json_depth
        output = MessageOutput(checked.use, checked.eager_tools, max_depth, fills_context=found.fills_context)
        writer = MessageWriter(f"msg_{request_id}", target.name, output)
        if body.stream:
            stream_body = partial(
                writer.events, generation=generation, call=call, tokenizer=runtime.tokenizer, scope=request.scope
            )
            return await open_stream(request, runtime, call, generation, stream_body)
        write = partial(writer.message, generation=generation)
        return await respond_complete(request, runtime, call, generation, write)


async def _count(request: Request, context: AppContext, path_adapter: str | None) -> TokenCount:
    body = await decode_body(request, COUNT_DECODER, refuse_kinds)
    target = await context.control.resolver.resolve_newest(principal_of(request), body.model, path_adapter=path_adapter)
    conversation = counted_conversation(body, context.runtime.settings)
    return TokenCount(len(await prompt_tokens(context, body, conversation, target.adapter)))


def _identified(request: Request, response: R) -> R:
    """Adds the header that Anthropic's clients read; its value is that of x-request-id, which every response has."""
    response.headers[REQUEST_ID] = request_id_of(request.scope)
    return response

"""POST /v1/responses and /v1/responses/input_tokens. Stateless: neither requests nor answers are stored."""

from functools import partial

import msgspec
from litestar import Request, Response, route
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.chat.adapter_template import with_turn_ends
from loraserve.api.chat.prompts import conversation_demand, conversation_prompt, prompt_tokens
from loraserve.api.chat.reasoning import with_reasoning
from loraserve.api.http.auth import principal_of
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.event_stream import EventStream
from loraserve.api.http.needs import needs
from loraserve.api.http.request_id import request_id_of
from loraserve.api.inference.respond import open_stream, respond_complete
from loraserve.api.inference.token_names import TokenNames
from loraserve.api.openapi.document import ERROR_RESPONSES, answered_with
from loraserve.api.responses.echo import begun_response
from loraserve.api.responses.kinds import refuse_kinds
from loraserve.api.responses.output import ResponseOutput
from loraserve.api.responses.request import checked_response
from loraserve.api.responses.writer import ResponseWriter
from loraserve.api.routes.inference_post import inference_post, text_post
from loraserve.api.schemas.response_answer import InputTokenCount, ResponseObject
from loraserve.api.schemas.responses import ResponsesRequest
from loraserve.control.requests.running import Route
from loraserve.control.tenancy.principal import Action
from loraserve.serving.errors import ErrorCode, ServingError

DECODER = msgspec.json.Decoder(ResponsesRequest, strict=True)
_post = inference_post(ResponsesRequest, answered_with(ResponseObject))
_count_post = text_post(ResponsesRequest, ERROR_RESPONSES)


@_post("/v1/responses")
async def create_response(
    request: Request, context: NamedDependency[AppContext]
) -> Response[ResponseObject] | EventStream:
    """Answer a conversation, as OpenAI's Responses API. Stateless: to continue, send all items so far in `input`."""
    return await _respond(request, context, None)


@_post("/adapters/{adapter:str}/v1/responses")
async def create_adapter_response(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> Response[ResponseObject] | EventStream:
    """As POST /v1/responses, for the adapter in the path. `model` may be left out; if sent, it must name the same
    adapter."""
    return await _respond(request, context, adapter)


@_count_post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request, context: NamedDependency[AppContext]) -> InputTokenCount:
    """Count the tokens in the prompt of a response, whether or not they fit the model. The body is that of
    POST /v1/responses; fields that only concern the answer are checked, too, as far as no model is needed for that."""
    return await _count(request, context, None)


@_count_post("/adapters/{adapter:str}/v1/responses/input_tokens")
async def count_adapter_input_tokens(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> InputTokenCount:
    """As POST /v1/responses/input_tokens, for the adapter in the path. `model` may be left out; if sent, it must name
    the same adapter."""
    return await _count(request, context, adapter)


@route(
    ["/v1/responses/{response_id:path}", "/adapters/{adapter:str}/v1/responses/{response_id:path}"],
    http_method=["GET", "POST", "DELETE"],
    opt=needs(Action.INFER),
    include_in_schema=False,
)
async def find_response() -> None:
    """404 for every operation on a stored response."""
    message = "Responses are not stored. Send their output items with the next 'input'."
    raise ServingError(ErrorCode.NOT_FOUND, message)


async def _count(request: Request, context: AppContext, path_adapter: str | None) -> InputTokenCount:
    body = await decode_body(request, DECODER, refuse_kinds)
    user = body.safety_identifier or body.user
    resolver = context.control.resolver
    target = await resolver.resolve_newest(principal_of(request), body.model, path_adapter=path_adapter, user=user)
    checked = checked_response(body, context.sampling, context.runtime.settings)
    token_ids = await prompt_tokens(context, body, checked.sampling, checked.conversation, target.adapter)
    return InputTokenCount(len(token_ids))


async def _respond(
    request: Request, context: AppContext, path_adapter: str | None
) -> Response[ResponseObject] | EventStream:
    body = await decode_body(request, DECODER, refuse_kinds)
    runtime, request_id = context.runtime, body.request_id or request_id_of(request.scope)
    target = await context.calls.resolve(request, body.model, path_adapter, body.safety_identifier or body.user)
    checked = checked_response(body, context.sampling, runtime.settings)
    sampling, conversation = checked.sampling, checked.conversation
    demand = conversation_demand(context, sampling, conversation, Route.RESPONSES, body.stream)
    async with context.calls.admit(request, target, demand) as call:
        prompt = await conversation_prompt(context, body, sampling, conversation, call.adapter, "max_output_tokens")
        prompt, text = with_reasoning(runtime, call.adapter, conversation, prompt, sampling.text)
        prompt, text = with_turn_ends(runtime, call.adapter, prompt, text)
        generation = await call.start([prompt], text, sampling.fields)
        names = TokenNames(runtime.tokenizer.token_text, as_ids=False)
        writer = ResponseWriter(
            begun_response(body, checked, target.name, request_id),
            ResponseOutput(request_id, checked.use, names, sampling.params.logprobs),
        )
        if body.stream:
            stream_body = partial(writer.events, generation=generation, call=call, tokenizer=runtime.tokenizer)
            return await open_stream(request, runtime, call, generation, stream_body)
        write = partial(writer.response, generation=generation)
        return await respond_complete(request, runtime, call, generation, write)

"""LoRAX's and TGI's routes: POST /, /generate, /generate_stream and GET /info."""

import string
from urllib.parse import quote

import msgspec
from litestar import Request, Response, get, post
from litestar.di import NamedDependency

from loraserve.api.app_context import AppContext
from loraserve.api.chat.adapter_template import template_of, with_turn_ends
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.event_stream import EventStream
from loraserve.api.http.needs import ANY_KEY, INFERENCE
from loraserve.api.http.ranges import unsupported
from loraserve.api.inference.call import InferenceCall
from loraserve.api.inference.identity import server_version
from loraserve.api.inference.prompts import check_not_empty, truncate
from loraserve.api.inference.respond import open_stream, respond_complete
from loraserve.api.inference.sampling import CheckedSampling, check_context, prompt_sampling
from loraserve.api.lorax.errors import LORAX_ERRORS
from loraserve.api.lorax.request import completion_of
from loraserve.api.lorax.writer import LoraxWriter
from loraserve.api.openapi.document import ERROR_RESPONSES, answered_with, json_body, lorax_error_responses
from loraserve.api.schemas.lorax import LoraxInfo, LoraxParameters, LoraxRequest, LoraxResponse
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.control.requests.admission import reserve_tokens
from loraserve.control.requests.running import Demand, Route, RouteInfo
from loraserve.serving.generation import Generation, Prompt
from loraserve.serving.text.choice import ChoiceDelta
from loraserve.serving.text.conversation import ChatMessage, Conversation

DECODER = msgspec.json.Decoder(LoraxRequest, strict=True)
OPERATION = json_body(LoraxRequest)
ERRORS = lorax_error_responses()
IN_HEADERS = string.punctuation.replace("%", "") + " "
"""Characters besides letters and digits that a header may contain; others are percent-encoded."""


@post(
    "/",
    opt=INFERENCE,
    status_code=200,
    operation_class=OPERATION,
    responses=answered_with(list[LoraxResponse], ERRORS),
    exception_handlers=LORAX_ERRORS,
    tags=["lorax"],
)
async def generate_as_asked(
    request: Request, context: NamedDependency[AppContext]
) -> Response[list[LoraxResponse]] | EventStream:
    """A list with one answer, or a stream if `stream` is true. Called by lorax-client."""
    body = await decode_body(request, DECODER)
    return await _generate(request, context, body, stream=body.stream, as_list=True)


@post(
    "/generate",
    opt=INFERENCE,
    status_code=200,
    operation_class=OPERATION,
    responses=answered_with(LoraxResponse, ERRORS, may_stream=False),
    exception_handlers=LORAX_ERRORS,
    tags=["lorax"],
)
async def generate(request: Request, context: NamedDependency[AppContext]) -> Response[LoraxResponse] | EventStream:
    """Continue a prompt."""
    body = await decode_body(request, DECODER)
    return await _generate(request, context, body, stream=False, as_list=False)


@post(
    "/generate_stream",
    opt=INFERENCE,
    status_code=200,
    operation_class=OPERATION,
    responses=ERRORS,
    exception_handlers=LORAX_ERRORS,
    tags=["lorax"],
)
async def generate_stream(
    request: Request, context: NamedDependency[AppContext]
) -> Response[LoraxResponse] | EventStream:
    """Continue a prompt and stream the answer, one event per token."""
    body = await decode_body(request, DECODER)
    return await _generate(request, context, body, stream=True, as_list=False)


@get("/info", opt=ANY_KEY, responses=ERROR_RESPONSES, tags=["lorax"])
async def get_info(context: NamedDependency[AppContext]) -> LoraxInfo:
    """Server information that clients of TGI and LoRAX read first."""
    model, settings = context.runtime.engine.model, context.runtime.settings
    return LoraxInfo(
        model_id=settings.served_model_names[0],
        model_sha=model.layout.fingerprint,
        model_dtype=model.dtype,
        model_device_type=model.device,
        max_concurrent_requests=model.max_num_seqs + settings.limits.max_queued,
        max_stop_sequences=settings.limits.max_stop_strings,
        max_input_length=model.max_model_len - 1,
        max_total_tokens=model.max_model_len,
        max_batch_total_tokens=model.max_num_batched_tokens,
        version=server_version(),
    )


async def _generate(
    request: Request, context: AppContext, body: LoraxRequest, *, stream: bool, as_list: bool
) -> Response | EventStream:
    runtime = context.runtime
    fields, parameters = completion_of(body)
    target = await context.calls.resolve(request, fields.model or runtime.settings.served_model_names[0])
    checked = context.sampling.check(
        fields,
        max_tokens=fields.max_tokens,
        logprobs=_logprobs(context, parameters, stream=stream),
        prompt_logprobs=_prompt_logprobs(parameters, stream=stream),
    )
    max_tokens = fields.max_tokens or context.sampling.default_max_tokens(runtime.engine.model.max_model_len)
    demand = Demand(reserve_tokens(len(body.inputs), max_tokens), 1, RouteInfo(Route.GENERATE, stream))
    async with context.calls.admit(request, target, demand) as call:
        prompt = await _prompt(context, body, parameters, checked, call.adapter)
        text = checked.text
        if parameters.apply_chat_template:
            prompt, text = with_turn_ends(runtime, call.adapter, prompt, text)
        generation = await call.start([prompt], text, checked.fields)
        seed = prompt.sampling.seed if prompt.sampling.temperature > 0 else None
        writer = LoraxWriter(runtime.tokenizer, body.inputs, parameters, seed)
        if stream:
            return await open_stream(
                request, runtime, call, generation, lambda steps: writer.events(steps, generation, call)
            )

        def written(deltas: list[ChoiceDelta]) -> LoraxResponse | list[LoraxResponse]:
            response = writer.response(deltas[0], generation)
            return [response] if as_list else response

        return await respond_complete(
            request, runtime, call, generation, written, lambda: _headers(context, call, generation)
        )


async def _prompt(
    context: AppContext,
    body: LoraxRequest,
    parameters: LoraxParameters,
    checked: CheckedSampling,
    adapter: ResolvedAdapter | None,
) -> Prompt:
    tokenizer, max_model_len = context.runtime.tokenizer, context.runtime.engine.model.max_model_len
    if parameters.apply_chat_template:
        token_ids = await tokenizer.encode_chat(
            Conversation([ChatMessage("user", body.inputs)], param="inputs"),
            add_special_tokens=False,
            template_name=template_of(adapter),
        )
    else:
        token_ids = await tokenizer.encode(body.inputs, add_special_tokens=True)
    token_ids = truncate(token_ids, parameters.truncate, max_model_len, checked.max_tokens, "parameters.truncate")
    check_not_empty("inputs", token_ids)
    check_context(len(token_ids), checked.max_tokens, max_model_len, "inputs", "max_new_tokens")
    max_tokens = checked.max_tokens or context.sampling.default_max_tokens(max_model_len - len(token_ids))
    return Prompt(token_ids, prompt_sampling(checked, max_tokens))


def _logprobs(context: AppContext, parameters: LoraxParameters, *, stream: bool) -> int | None:
    count = parameters.return_k_alternatives
    if count is not None:
        context.sampling.check_top_logprobs("parameters.return_k_alternatives", count)
    return (count or 0) if stream or parameters.details else None


def _prompt_logprobs(parameters: LoraxParameters, *, stream: bool) -> int | None:
    if not parameters.decoder_input_details:
        return None
    if stream or not parameters.details:
        message = "needs 'details': true and is not available with a stream."
        raise unsupported("parameters.decoder_input_details", message)
    return 0


def _headers(context: AppContext, call: InferenceCall, generation: Generation) -> dict[str, str]:
    usage = generation.usage()
    headers = {
        "x-model-id": quote(context.runtime.settings.served_model_names[0], safe=IN_HEADERS),
        "x-prompt-tokens": str(usage.num_prompt_tokens),
        "x-generated-tokens": str(usage.num_completion_tokens),
        "x-total-tokens": str(usage.num_prompt_tokens + usage.num_completion_tokens),
    }
    if call.adapter is not None:
        headers["x-adapter-id"] = call.adapter.name
    return headers

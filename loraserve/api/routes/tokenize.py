"""POST /tokenize and /detokenize."""

import msgspec
from litestar import Request
from litestar.di import NamedDependency
from msgspec import UNSET

from loraserve.api.app_context import AppContext
from loraserve.api.chat.adapter_template import template_of
from loraserve.api.chat.conversations import conversation_of
from loraserve.api.chat.tools import checked_tools
from loraserve.api.http.auth import principal_of
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.ranges import check_token_ids
from loraserve.api.openapi.document import ERROR_RESPONSES
from loraserve.api.routes.inference_post import text_post
from loraserve.api.schemas.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value

TOKENIZE_DECODER = msgspec.json.Decoder(TokenizeRequest, strict=True)
DETOKENIZE_DECODER = msgspec.json.Decoder(DetokenizeRequest, strict=True)


@text_post(TokenizeRequest, ERROR_RESPONSES)("/tokenize")
async def tokenize(request: Request, context: NamedDependency[AppContext]) -> TokenizeResponse:
    """The token ids with which a completion of `prompt` or a chat with `messages` would begin."""
    body = await decode_body(request, TOKENIZE_DECODER)
    runtime = context.runtime
    adapter = await _adapter(request, context, body.model)
    token_ids = await _token_ids(context, body, adapter)
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=runtime.engine.model.max_model_len,
        tokens=token_ids,
        token_strs=await runtime.tokenizer.token_strings(token_ids) if body.return_token_strs else UNSET,
    )


@text_post(DetokenizeRequest, ERROR_RESPONSES)("/detokenize")
async def detokenize(request: Request, context: NamedDependency[AppContext]) -> DetokenizeResponse:
    """The text of token ids, including special tokens."""
    body = await decode_body(request, DETOKENIZE_DECODER)
    runtime = context.runtime
    await _adapter(request, context, body.model)
    check_token_ids("tokens", body.tokens, runtime.engine.model.vocab_size)
    return DetokenizeResponse(await runtime.tokenizer.decode(body.tokens, skip_special_tokens=False))


async def _adapter(request: Request, context: AppContext, model: str | None) -> ResolvedAdapter | None:
    """Only chats depend on it, through its chat template. It may be absent, but not unknown."""
    if model is None:
        return None
    return (await context.control.resolver.resolve_newest(principal_of(request), model)).adapter


async def _token_ids(context: AppContext, body: TokenizeRequest, adapter: ResolvedAdapter | None) -> list[int]:
    tokenizer, limits = context.runtime.tokenizer, context.runtime.settings.limits
    if (body.prompt is None) == (body.messages is None):
        raise ServingError(ErrorCode.MISSING_PARAMETER, "Send either 'prompt' or 'messages'.", param="prompt")
    if body.messages is None:
        _refuse_chat_fields(body)
        return await tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    conversation = conversation_of(body, body.messages, checked_tools(body.tools, limits), limits)
    return await tokenizer.encode_chat(
        conversation, add_special_tokens=bool(body.add_special_tokens), template_name=template_of(adapter)
    )


def _refuse_chat_fields(body: TokenizeRequest) -> None:
    for field in ("continue_final_message", "chat_template_kwargs", "tools"):
        if getattr(body, field):
            raise invalid_value(field, "is only for 'messages'.")

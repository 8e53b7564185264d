"""The prompt of a message, and the maximum length of its answer."""

from dataclasses import dataclass

from loraserve.api.app_context import AppContext
from loraserve.api.chat.adapter_template import template_of
from loraserve.api.chat.reasoning import answer_header
from loraserve.api.inference.prompts import check_not_empty, truncate
from loraserve.api.inference.sampling import CheckedSampling, prompt_sampling
from loraserve.api.schemas.messages import CountTokensRequest, MessagesRequest
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.generation import Prompt
from loraserve.serving.text.conversation import Conversation


@dataclass(frozen=True, slots=True)
class MessagePrompt:
    prompt: Prompt
    fills_context: bool
    """Whether the model's context limits the answer rather than the request's `max_tokens`."""


async def prompt_tokens(
    context: AppContext,
    body: MessagesRequest | CountTokensRequest,
    conversation: Conversation,
    adapter: ResolvedAdapter | None,
) -> list[int]:
    """adapter: the one whose chat template applies. Raises `ServingError` if the prompt has no tokens."""
    token_ids = await context.runtime.tokenizer.encode_chat(
        conversation, add_special_tokens=bool(body.add_special_tokens), template_name=template_of(adapter)
    )
    check_not_empty(conversation.param, token_ids)
    return token_ids


async def message_prompt(
    context: AppContext,
    body: MessagesRequest,
    checked: CheckedSampling,
    conversation: Conversation,
    adapter: ResolvedAdapter | None,
) -> MessagePrompt:
    """Raises `ServingError` if the prompt leaves no room for an answer.

    One token of room is enough: Anthropic's clients send the model's maximum output as `max_tokens`.
    """
    max_model_len = context.runtime.engine.model.max_model_len
    token_ids = await prompt_tokens(context, body, conversation, adapter)
    token_ids += answer_header(context.runtime, adapter, checked.params.grammar, conversation)
    token_ids = truncate(token_ids, body.truncate_prompt_tokens, max_model_len, body.max_tokens)
    room = max_model_len - len(token_ids)
    if room < 1:
        raise _too_long(len(token_ids), max_model_len, conversation.param)
    max_tokens = min(body.max_tokens, room)
    return MessagePrompt(Prompt(token_ids, prompt_sampling(checked, max_tokens)), max_tokens < body.max_tokens)


def _too_long(num_tokens: int, max_model_len: int, param: str) -> ServingError:
    """Begins with words that Claude Code recognizes: it then summarizes the conversation and continues."""
    message = f"prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum. "
    message += f"The model's context has {max_model_len}, one of which is reserved for the answer. Shorten '{param}'."
    return ServingError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=param)

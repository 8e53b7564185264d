"""The prompt of a message, and how long its answer may be."""

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
    """Whether the model's context, and not the request, says where the answer ends at the latest."""


async def prompt_tokens(
    context: AppContext,
    asked: MessagesRequest | CountTokensRequest,
    conversation: Conversation,
    adapter: ResolvedAdapter | None,
) -> list[int]:
    """adapter: whose chat template counts. Raises `ServingError` where there are none."""
    token_ids = await context.runtime.tokenizer.encode_chat(
        conversation, add_special_tokens=bool(asked.add_special_tokens), template_name=template_of(adapter)
    )
    check_not_empty(conversation.param, token_ids)
    return token_ids


async def message_prompt(
    context: AppContext,
    asked: MessagesRequest,
    checked: CheckedSampling,
    conversation: Conversation,
    adapter: ResolvedAdapter | None,
) -> MessagePrompt:
    """Raises `ServingError` where it leaves no room for an answer.

    More room for the answer is not asked for: Anthropic's clients send the most that a model can say as `max_tokens`.
    """
    max_model_len = context.runtime.engine.model.max_model_len
    token_ids = await prompt_tokens(context, asked, conversation, adapter)
    token_ids += answer_header(context.runtime, adapter, checked.params.grammar, conversation)
    token_ids = truncate(token_ids, asked.truncate_prompt_tokens, max_model_len, asked.max_tokens)
    room = max_model_len - len(token_ids)
    if room < 1:
        raise _too_long(len(token_ids), max_model_len, conversation.param)
    max_tokens = min(asked.max_tokens, room)
    return MessagePrompt(Prompt(token_ids, prompt_sampling(checked, max_tokens)), max_tokens < asked.max_tokens)


def _too_long(num_tokens: int, max_model_len: int, param: str) -> ServingError:
    """In words that Claude Code knows: it sums up the conversation then, and goes on."""
    message = f"prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum. "
    message += f"The model's context has {max_model_len}, one of them for the answer. Shorten '{param}'."
    return ServingError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=param)

"""From a conversation to its demand on the server and its prompt."""

from dataclasses import replace

from loraserve.api.app_context import AppContext
from loraserve.api.chat.adapter_template import template_of
from loraserve.api.chat.predictions import predicted_tokens
from loraserve.api.chat.reasoning import answer_header, try_token_id
from loraserve.api.chat.tools import ToolUse
from loraserve.api.inference.prompts import check_not_empty, truncate
from loraserve.api.inference.sampling import CheckedSampling, check_context, prompt_sampling
from loraserve.api.schemas.sampling import SamplingFields
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.control.requests.admission import reserve_tokens
from loraserve.control.requests.running import Demand, Route, RouteInfo
from loraserve.engine.request import GrammarKind, GrammarMark, SamplingParams
from loraserve.serving.generation import Prompt
from loraserve.serving.runtime import Runtime
from loraserve.serving.text.conversation import Conversation
from loraserve.serving.tool_calls.formats import SYNTAXES


def conversation_demand(
    context: AppContext, checked: CheckedSampling, conversation: Conversation, route: Route, stream: bool | None
) -> Demand:
    max_tokens = checked.max_tokens or context.sampling.default_max_tokens(context.runtime.engine.model.max_model_len)
    num_tokens = reserve_tokens(conversation.num_chars, max_tokens, checked.params.n)
    return Demand(num_tokens, checked.params.n, RouteInfo(route, bool(stream)))


async def prompt_tokens(
    context: AppContext,
    body: SamplingFields,
    checked: CheckedSampling,
    conversation: Conversation,
    adapter: ResolvedAdapter | None,
) -> list[int]:
    """Whether or not they fit the model. Raises `ServingError` if there are none. adapter: as below."""
    token_ids = await context.runtime.tokenizer.encode_chat(
        conversation, add_special_tokens=bool(body.add_special_tokens), template_name=template_of(adapter)
    )
    token_ids += answer_header(context.runtime, adapter, checked.params.grammar, conversation)
    max_model_len = context.runtime.engine.model.max_model_len
    token_ids = truncate(token_ids, body.truncate_prompt_tokens, max_model_len, checked.max_tokens)
    check_not_empty(conversation.param, token_ids)
    return token_ids


async def conversation_prompt(
    context: AppContext,
    body: SamplingFields,
    checked: CheckedSampling,
    conversation: Conversation,
    adapter: ResolvedAdapter | None,
    max_tokens_param: str,
    predicted: str = "",
) -> Prompt:
    """Raises `ServingError` if it does not fit the model.

    adapter: the call's, whose chat template applies. max_tokens_param: the API's name for the answer's limit.
    predicted: approximate text of the answer, for drafts.
    """
    model = context.runtime.engine.model
    token_ids = await prompt_tokens(context, body, checked, conversation, adapter)
    check_context(len(token_ids), checked.max_tokens, model.max_model_len, conversation.param, max_tokens_param)
    max_tokens = checked.max_tokens or context.sampling.default_max_tokens(model.max_model_len - len(token_ids))
    predicted_token_ids = await predicted_tokens(predicted, context.runtime.tokenizer, model) if predicted else []
    sampling = _with_tokens_of_calls(context.runtime, prompt_sampling(checked, max_tokens))
    return Prompt(token_ids, sampling, predicted_token_ids)


def _with_tokens_of_calls(runtime: Runtime, sampling: SamplingParams) -> SamplingParams:
    """Lets the marks of calls be one token each, if the model has one: a call may take the place of a format, or be
    forced."""
    grammar = sampling.grammar
    if grammar is None:
        return sampling
    if grammar.calls is not None:
        calls = replace(grammar.calls, opening_id=try_token_id(runtime, grammar.calls.opening))
        grammar = replace(grammar, calls=calls)
    marks = tuple(replace(mark, token_id=try_token_id(runtime, mark.text)) for mark in grammar.marks)
    return replace(sampling, grammar=replace(grammar, marks=marks))


def with_call_format(checked: CheckedSampling, use: ToolUse) -> CheckedSampling:
    """Keeps special tokens in the text if it is searched for calls: a call's opening may be one. Forced calls follow
    the format's syntax, if they can."""
    if use.call_format is None:
        return checked
    checked = replace(checked, text=replace(checked.text, skip_special_tokens=False))
    grammar = checked.params.grammar
    if grammar is None or use.syntax is None:
        return checked
    syntax = SYNTAXES[use.call_format]
    marks = (GrammarMark(syntax.opening), GrammarMark(syntax.closing))
    grammar = replace(grammar, kind=GrammarKind.LARK, text=use.syntax, marks=marks)
    return replace(checked, params=replace(checked.params, grammar=grammar))

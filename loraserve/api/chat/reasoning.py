"""How the answer to a conversation begins, on a server that separates reasoning from content."""

from dataclasses import replace

from loraserve.api.chat.adapter_template import template_of, with_ends
from loraserve.api.http.ranges import unsupported
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.engine.request import Grammar, ReasoningLimit, ReasoningTokens, SamplingParams
from loraserve.serving.errors import invalid_value
from loraserve.serving.generation import Prompt
from loraserve.serving.runtime import Runtime
from loraserve.serving.text.chat_template import ChatTemplate
from loraserve.serving.text.choice import TextOptions
from loraserve.serving.text.conversation import Conversation, ReasoningBudget, ReasoningEffort
from loraserve.serving.text.harmony import CALL, CHANNEL, END, FINAL, MESSAGE, RETURN, START, HarmonyStart
from loraserve.serving.text.harmony import MARKS as HARMONY_MARKS
from loraserve.serving.text.reasoning import MARKS, ReasoningFormat, ReasoningMarks, ReasoningStart
from loraserve.serving.text.token_text import TokenText
from loraserve.serving.tool_calls.formats import ToolCallFormat

OPENS_WITHIN = 2
"""Tokens of an answer among which its reasoning may open: models may write white space before it, as one token."""
NO_MARKS = "this model has no tokens that mark reasoning."
MAX_TAIL = 32
"""Number of tokens examined at a prompt's end: enough for the text that templates write after the last message."""


def with_reasoning(
    runtime: Runtime, adapter: ResolvedAdapter | None, conversation: Conversation, prompt: Prompt, text: TextOptions
) -> tuple[Prompt, TextOptions]:
    """A grammar constrains only what follows the reasoning, or the whole answer if the model has no tokens for marks.

    Raises `ServingError` if the request asks for no reasoning but the model will reason anyway, or limits reasoning
    that cannot be limited.
    """
    parser, token_text = runtime.settings.reasoning_parser, runtime.tokenizer.token_text
    if parser is None:
        _refuse_budget(conversation.budget, "this server was started without --reasoning-parser.")
        return prompt, text
    own = runtime.tokenizer.adapter_template(template_of(adapter))
    if parser is ReasoningFormat.OPENAI_GPTOSS:
        if _is_harmony(own):
            return _with_harmony(runtime, conversation, prompt, text)
        _refuse_budget(conversation.budget, NO_MARKS)
        return prompt, text
    marks = MARKS[parser]
    if own is not None and not own.mentions(marks.closing):
        marks = replace(marks, may_lack_opening=False)
    start = ReasoningStart(marks, _has_begun(marks, conversation, prompt.token_ids, token_text))
    if start.has_begun:
        _refuse_none(conversation.effort)
    opening_id, closing_id = try_token_id(runtime, marks.opening), try_token_id(runtime, marks.closing)
    grammar = prompt.sampling.grammar
    if opening_id is not None and closing_id is not None:
        opens_within = OPENS_WITHIN if grammar is None else 1
        tokens = ReasoningTokens(None if start.has_begun else opening_id, closing_id, opens_within)
        prompt = replace(prompt, sampling=_marked(prompt.sampling, tokens, conversation.budget))
        start = replace(start, tokens=None if grammar is None and conversation.budget is None else tokens)
    elif grammar is not None:
        return prompt, text
    else:
        _refuse_budget(conversation.budget, NO_MARKS)
    if {opening_id, closing_id} & token_text.special_ids:
        text = replace(text, skip_special_tokens=False)
    return prompt, replace(text, reasoning=start)


def _marked(sampling: SamplingParams, tokens: ReasoningTokens, budget: ReasoningBudget | None) -> SamplingParams:
    """Raises `ServingError` if other parameters forbid the token that ends the reasoning."""
    limit, closing_id = None, tokens.closing_id
    if budget is not None:
        if sampling.allowed_token_ids and closing_id not in sampling.allowed_token_ids:
            message = f"must contain {closing_id}, which ends the reasoning, because '{budget.param}' is set."
            raise invalid_value("allowed_token_ids", message)
        if sampling.min_tokens > 0 and closing_id in sampling.stop_token_ids:
            message = (
                f"contains {closing_id}, which ends the reasoning: not with both 'min_tokens' and '{budget.param}'."
            )
            raise invalid_value("stop_token_ids", message)
        limit = ReasoningLimit(tokens, budget.max_tokens)
    grammar = None if sampling.grammar is None else replace(sampling.grammar, reasoning=tokens)
    return replace(sampling, grammar=grammar, reasoning_limit=limit)


def answer_header(
    runtime: Runtime, adapter: ResolvedAdapter | None, grammar: Grammar | None, conversation: Conversation
) -> list[int]:
    """Tokens to append to the rendered template. With a grammar, gpt-oss answers without reasoning: this header begins
    the message that the grammar constrains. Otherwise empty."""
    own = runtime.tokenizer.adapter_template(template_of(adapter))
    if runtime.settings.reasoning_parser is not ReasoningFormat.OPENAI_GPTOSS or not _is_harmony(own):
        return []
    header = [try_token_id(runtime, part) for part in (CHANNEL, FINAL, MESSAGE)]
    is_wanted = grammar is not None and conversation.add_generation_prompt and None not in header
    return [part for part in header if part is not None] if is_wanted else []


def _is_harmony(own: ChatTemplate | None) -> bool:
    """own: the adapter's template; None = the base model's, for which the operator chose the parser."""
    return own is None or own.is_harmony


def _with_harmony(
    runtime: Runtime, conversation: Conversation, prompt: Prompt, text: TextOptions
) -> tuple[Prompt, TextOptions]:
    """With a grammar, or if the model lacks the format's tokens, the whole answer is content."""
    ids = {mark: try_token_id(runtime, mark) for mark in HARMONY_MARKS}
    if prompt.sampling.grammar is not None:
        return prompt, text
    _refuse_budget(conversation.budget, "gpt-oss has no budget; with a lower effort it thinks less.")
    if None in (ids[START], ids[CHANNEL], ids[MESSAGE], ids[END]):
        return prompt, text
    _refuse_none(conversation.effort)
    reports_calls = runtime.settings.tool_call_parser is ToolCallFormat.OPENAI and conversation.tools
    start = HarmonyStart(
        marks={token_id: mark for mark, token_id in ids.items() if token_id is not None},
        tool_names=frozenset(tool["function"]["name"] for tool in conversation.tools) if reports_calls else None,
        is_in_message=not conversation.add_generation_prompt,
    )
    text = replace(text, reasoning=start, skip_special_tokens=False)
    # Not all checkpoints list the end of a call among the tokens that end an answer.
    ends = tuple(token_id for mark in (CALL, RETURN) if (token_id := ids[mark]) is not None)
    return with_ends(prompt, text, ends)


def _refuse_none(effort: ReasoningEffort | None) -> None:
    if effort is not None and effort.is_none:
        message = f"is {effort.word or effort.value!r}, but this model always reasons first."
        raise unsupported(effort.param, message)


def _refuse_budget(budget: ReasoningBudget | None, reason: str) -> None:
    if budget is not None:
        raise unsupported(budget.param, f"is {budget.max_tokens}, but {reason}")


def try_token_id(runtime: Runtime, mark: str) -> int | None:
    """None also for a token that the tokenizer has but the model does not, which it can never generate."""
    token_id = runtime.tokenizer.token_id(mark)
    return None if token_id is None or token_id >= runtime.engine.model.vocab_size else token_id


def _has_begun(
    marks: ReasoningMarks, conversation: Conversation, prompt_token_ids: list[int], token_text: TokenText
) -> bool:
    """Whether the answer starts within its reasoning: templates may open it, or open and close it if none is wanted."""
    tail = b"".join(map(token_text.bytes_of, prompt_token_ids[-MAX_TAIL:])).decode(errors="replace").rstrip()
    if tail.endswith((marks.opening, marks.closing)):
        return tail.endswith(marks.opening)
    return marks.may_lack_opening and conversation.add_generation_prompt

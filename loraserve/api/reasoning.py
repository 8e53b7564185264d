"""How the answer to a conversation begins, on a server that tells reasoning from content."""

from dataclasses import replace

from loraserve.engine.request import GrammarReasoning
from loraserve.serving.choice import TextOptions
from loraserve.serving.conversation import Conversation
from loraserve.serving.generation import Prompt
from loraserve.serving.reasoning import MARKS, ReasoningFormat, ReasoningMarks, ReasoningStart
from loraserve.serving.token_text import TokenText
from loraserve.serving.tokenizer import TextTokenizer

MAX_TAIL = 32
"""Tokens at a prompt's end that are looked at: what templates write behind the last message."""


def with_reasoning(
    reasoning_format: ReasoningFormat | None,
    conversation: Conversation,
    prompt: Prompt,
    text: TextOptions,
    tokenizer: TextTokenizer,
) -> tuple[Prompt, TextOptions]:
    """A grammar holds what follows the reasoning. Where its marks are no tokens of their own, it holds all of it."""
    if reasoning_format is None:
        return prompt, text
    marks = MARKS[reasoning_format]
    start = ReasoningStart(marks, _has_begun(marks, conversation, prompt.token_ids, tokenizer.token_text))
    opening_id, closing_id = tokenizer.token_id(marks.opening), tokenizer.token_id(marks.closing)
    grammar = prompt.sampling.grammar
    if grammar is not None:
        if opening_id is None or closing_id is None:
            return prompt, text
        reasoning = GrammarReasoning(None if start.has_begun else opening_id, closing_id)
        prompt = replace(prompt, sampling=replace(prompt.sampling, grammar=replace(grammar, reasoning=reasoning)))
    if {opening_id, closing_id} & tokenizer.token_text.special_ids:
        text = replace(text, skip_special_tokens=False)
    return prompt, replace(text, reasoning=start)


def _has_begun(
    marks: ReasoningMarks, conversation: Conversation, prompt_token_ids: list[int], token_text: TokenText
) -> bool:
    """Templates may begin a reasoning, or end it where none is wanted."""
    tail = b"".join(map(token_text.bytes_of, prompt_token_ids[-MAX_TAIL:])).decode(errors="replace").rstrip()
    if tail.endswith((marks.opening, marks.closing)):
        return tail.endswith(marks.opening)
    return marks.may_lack_opening and conversation.add_generation_prompt

"""The response formats of /v1/chat/completions."""

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from loraserve.api.chat.answer import ChatAnswer, chat_answer, joined_calls
from loraserve.api.chat.tools import ToolUse
from loraserve.api.inference.chunks import ChunkHead
from loraserve.api.inference.content_logprobs import content_logprobs
from loraserve.api.inference.prompt_logprobs import prompt_logprobs
from loraserve.api.inference.token_names import TokenNames
from loraserve.api.schemas.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    ResponseMessage,
)
from loraserve.api.schemas.tools import ToolCallDelta
from loraserve.api.schemas.usage import usage_of
from loraserve.serving.generation import Generation
from loraserve.serving.text.choice import ChoiceDelta
from loraserve.serving.text.token_text import TokenText

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    n: int
    top_logprobs: int | None
    """None = no logprobs."""
    prompt_logprobs: int | None
    return_token_ids: bool
    tokens_as_ids: bool
    tool_use: ToolUse
    has_reasoning: bool = False
    """Whether reasoning is separated from content."""
    include_reasoning: bool = True


class ChatWriter:
    """One per request: if tools may be called, it keeps held-back text."""

    def __init__(self, head: ChunkHead, options: ChatOptions, token_text: TokenText) -> None:
        self.head = head
        self._options = options
        self._token_text = token_text
        self._names = TokenNames(token_text, options.tokens_as_ids)
        self._answers = _answers(options)
        """One per choice; empty if no tools may be called."""
        self._may_lack_content = bool(self._answers) or options.has_reasoning
        """Then empty content is null: a message may consist of calls or reasoning alone."""

    def response(self, deltas: list[ChoiceDelta], generation: Generation) -> ChatCompletionResponse:
        prompt, options = generation.prompts[0], self._options
        return ChatCompletionResponse(
            id=self.head.id,
            object=self.head.object,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.system_fingerprint,
            choices=[self._choice(delta) for delta in deltas],
            usage=usage_of(generation.usage()),
            prompt_logprobs=UNSET
            if options.prompt_logprobs is None
            else prompt_logprobs(prompt.prompt_logprobs, options.prompt_logprobs, self._token_text),
            **self.prompt_fields(generation),
        )

    def opening(self, generation: Generation) -> list[msgspec.Struct]:
        content = None if self._may_lack_content else ""
        return [ChatChunkChoice(index, ChatDelta(role=ASSISTANT, content=content)) for index in range(self._options.n)]

    def prompt_fields(self, generation: Generation) -> dict[str, Any]:
        """Next to the choices, which share one prompt, as in vLLM."""
        if not self._options.return_token_ids:
            return {}
        return {"prompt_token_ids": generation.prompts[0].engine_request.prompt_token_ids}

    def chunk_choices(self, delta: ChoiceDelta, generation: Generation) -> list[msgspec.Struct]:
        """The last one has an empty delta and the finish reason."""
        content, calls = self._read(delta)
        reasoning = (delta.reasoning if self._options.include_reasoning else "") or None
        choices: list[msgspec.Struct] = []
        if content or reasoning or self._includes_tokens(delta) or (content is not None and _has_tokens(delta)):
            said = ChatDelta(content=content, reasoning_content=reasoning, reasoning=reasoning)
            choices.append(ChatChunkChoice(delta.index, said, self._logprobs(delta), token_ids=self._token_ids(delta)))
        choices += [ChatChunkChoice(delta.index, ChatDelta(tool_calls=[part])) for part in calls]
        if delta.finish_reason is not None:
            choices.append(
                ChatChunkChoice(
                    delta.index,
                    ChatDelta(),
                    finish_reason=self._finish_reason(delta),
                    stop_reason=delta.stop_reason,
                )
            )
        return choices

    def _choice(self, delta: ChoiceDelta) -> ChatChoice:
        content, parts = self._read(delta)
        calls = joined_calls(parts)
        reasoning = UNSET
        if self._options.has_reasoning and self._options.include_reasoning:
            reasoning = delta.reasoning or None
        return ChatChoice(
            index=delta.index,
            message=ResponseMessage(
                ASSISTANT,
                content if calls or reasoning else content or "",
                tool_calls=calls or UNSET,
                reasoning_content=reasoning,
                reasoning=reasoning,
            ),
            logprobs=self._logprobs(delta),
            finish_reason=self._finish_reason(delta),
            stop_reason=delta.stop_reason,
            token_ids=self._token_ids(delta),
        )

    def _read(self, delta: ChoiceDelta) -> tuple[str | None, list[ToolCallDelta]]:
        """Content and parts of calls; None = no content, or none yet."""
        if not self._answers:
            return (delta.text or None if self._may_lack_content else delta.text), []
        read = self._answers[delta.index].read(delta)
        content = "".join(part for part in read if isinstance(part, str))
        return content or None, [part for part in read if not isinstance(part, str)]

    def _finish_reason(self, delta: ChoiceDelta) -> str | None:
        if delta.finish_reason is None or not self._answers:
            return delta.finish_reason
        return self._answers[delta.index].finish_reason(delta.finish_reason)

    def _includes_tokens(self, delta: ChoiceDelta) -> bool:
        return bool(delta.token_ids) and (self._options.top_logprobs is not None or self._options.return_token_ids)

    def _token_ids(self, delta: ChoiceDelta) -> list[int] | msgspec.UnsetType:
        return delta.token_ids if self._options.return_token_ids else UNSET

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        count = self._options.top_logprobs
        return None if count is None else ChatLogprobs(content_logprobs(self._names, delta.logprobs, count))


def _answers(options: ChatOptions) -> list[ChatAnswer]:
    answers = (chat_answer(options.tool_use) for _ in range(options.n))
    return [answer for answer in answers if answer is not None]


def _has_tokens(delta: ChoiceDelta) -> bool:
    """Whether it has tokens other than one that ended the choice without text."""
    is_silent_end = delta.finish_reason is not None and not delta.text
    return bool(delta.token_ids) and not is_silent_end

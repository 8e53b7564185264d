"""The base model's own chat template, rendered as transformers does. Clients send neither template nor arguments."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loraserve.serving.errors import ErrorCode, ServingError, invalid_value

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    name: str | None = None

    def for_template(self, developer_role: str) -> dict[str, str]:
        """Templates index messages like JSON objects."""
        message = {"role": developer_role if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else message | {"name": self.name}


class ChatTemplate:
    """Compiled once; `render` is safe to call from several threads."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special_tokens = special_tokens
        # Templates written before OpenAI renamed the system role do not know "developer".
        self._developer_role = "developer" if "developer" in source else "system"

    def render(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> str:
        """Raises `ServingError` where the template refuses the conversation."""
        chat = [message.for_template(self._developer_role) for message in messages]
        if continue_final_message:
            chat[-1]["content"] += CONTINUE_TAG
        text = self._render(chat, add_generation_prompt)
        return _cut_at_tag(text) if continue_final_message else text

    def _render(self, chat: list[dict[str, str]], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=chat,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise invalid_value("messages", f"does not fit the model's chat template: {error}") from error
        except Exception as error:
            raise invalid_value("messages", "does not fit the model's chat template.") from error


def no_chat_template() -> ServingError:
    message = "The model has no chat template. Use /v1/completions, or start the server with --chat-template."
    return ServingError(ErrorCode.INVALID_VALUE, message, param="messages")


def _cut_at_tag(text: str) -> str:
    """What transformers does for continue_final_message: the text up to where the final message ends."""
    position = text.rfind(CONTINUE_TAG.strip())
    if position < 0:
        raise invalid_value("continue_final_message", "cannot be used: the chat template drops the final message.")
    if text.startswith(CONTINUE_TAG, position):
        return text[:position]
    # The template trims messages, so it would have trimmed this one's end too.
    return text[:position].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """{% generation %} marks what the assistant said, for training; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML characters, which prompts must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

"""Chat templates of the base model and the operator, rendered as in transformers. Clients cannot send templates."""

import json
from datetime import datetime

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loraserve.serving.errors import NO_RETRY, ErrorCode, ServingError, invalid_value
from loraserve.serving.text.conversation import ChatMessage, Conversation, JsonObject, ReasoningEffort
from loraserve.serving.text.harmony import CHANNEL
from loraserve.serving.text.harmony_messages import described, for_harmony

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
OF_THE_REQUEST = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
OF_TRANSFORMERS = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Arguments of `apply_chat_template` that are not template variables."""
_PROBE = "content of a message"
ADAPTERS_FLAG = "--adapter-chat-templates"


class ChatTemplate:
    """Compiled once; `render` is safe to call from several threads."""

    def __init__(self, source: str, special_tokens: dict[str, str], name: str | None = None) -> None:
        """name: of a template that adapters may choose; None = the base model's template."""
        environment = _environment()
        self._called = "the model's chat template" if name is None else f"the adapter's chat template '{name}'"
        another = "a --chat-template that does" if name is None else f"one of that name that does ({ADAPTERS_FLAG})"
        self._remedy = f"Start the server with {another}."
        self._source = source
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens
        self._reserved = OF_THE_REQUEST | OF_TRANSFORMERS | special_tokens.keys() | environment.globals.keys()
        self._variables_used = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self._uses_tool_calls = "tool_calls" in source
        self.is_harmony = CHANNEL in source and "message.thinking" in source
        # Templates written before OpenAI renamed the system role do not know "developer".
        self._developer_role = "developer" if "developer" in source else "system"
        self._takes_parts = False
        """It expects a message's content as a list of parts, as templates of models with images often do."""
        if not self._shows_content():
            self._takes_parts = True
            self._takes_parts = self._shows_content()

    def render(self, conversation: Conversation) -> str:
        """Raises `ServingError` if the template rejects the conversation."""
        self._check(conversation)
        variables = self._variables(conversation)
        try:
            text = self._template.render(variables)
        except jinja2.TemplateError as error:
            raise invalid_value(conversation.param, f"does not fit {self._called}: {error}") from error
        except Exception as error:
            raise invalid_value(conversation.param, f"does not fit {self._called}.") from error
        return _cut_at_tag(text) if conversation.continue_final_message else text

    def mentions(self, mark: str) -> bool:
        return mark in self._source

    def _shows_content(self) -> bool:
        """Whether the content of a user's message becomes part of the text, with or without a system message."""
        user = ChatMessage("user", _PROBE)
        for messages in ([user], [ChatMessage("system", "system"), user]):
            try:
                text = self._template.render(self._variables(Conversation(messages)))
            except Exception:
                continue  # it may expect other messages
            if _PROBE in text.lower():
                return True
        return False

    def _check(self, conversation: Conversation) -> None:
        for name in conversation.template_kwargs:
            if name in self._reserved:
                param = f"chat_template_kwargs.{name}"
                raise invalid_value(param, "cannot be set by a request. Leave it out.")
        if conversation.tools and "tools" not in self._variables_used:
            raise invalid_value("tools", f"cannot be used: {self._called} does not support tools. {self._remedy}")
        if not self._uses_tool_calls and any(message.tool_calls for message in conversation.messages):
            message = f"has tool calls, which {self._called} does not support. {self._remedy}"
            raise invalid_value(conversation.param, message)

    def _variables(self, conversation: Conversation) -> JsonObject:
        messages, tools = conversation.messages, conversation.tools
        if self.is_harmony:
            messages, tools = for_harmony(messages), [*map(described, tools)]
        chat = [message.for_template(self._developer_role) for message in messages]
        if self.is_harmony:
            for message in chat:
                if "reasoning" in message:
                    message["thinking"] = message["reasoning"]
        if conversation.continue_final_message:
            chat[-1]["content"] += CONTINUE_TAG
        if self._takes_parts:
            for message in chat:
                message["content"] = _as_parts(message["content"])
        return {
            **self._effort_variables(conversation.effort),
            **conversation.template_kwargs,
            **self._special_tokens,
            "messages": chat,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }

    def _effort_variables(self, effort: ReasoningEffort | None) -> JsonObject:
        """The template's variables for the effort. Raises `ServingError` if the template cannot express it."""
        if effort is None:
            return {}
        if "reasoning_effort" in self._variables_used:
            return {"reasoning_effort": effort.value}
        if effort.is_default:
            return {}
        if not effort.is_none:
            message = f"'{effort.param}' is {effort.value!r}; {self._called} takes no reasoning effort. Leave it out."
            raise ServingError(ErrorCode.UNSUPPORTED_PARAMETER, message, param=effort.param)
        return {"enable_thinking": False} if "enable_thinking" in self._variables_used else {}


def no_chat_template(param: str) -> ServingError:
    message = "The model has no chat template. Use /v1/completions, or start the server with --chat-template."
    return ServingError(ErrorCode.INVALID_VALUE, message, param=param)


def no_adapter_template(name: str) -> ServingError:
    message = f"The adapter's chat template '{name}' is not available on this server. Use /v1/completions, or start"
    message += f" the server with it ({ADAPTERS_FLAG})."
    return ServingError(ErrorCode.ADAPTER_TEMPLATE_MISSING, message, headers=NO_RETRY)


def _as_parts(content: str | None) -> list[JsonObject]:
    return [] if content is None else [{"type": "text", "text": content}]


def _cut_at_tag(text: str) -> str:
    """As in transformers for continue_final_message: the text up to the end of the final message."""
    position = text.rfind(CONTINUE_TAG.strip())
    if position < 0:
        raise invalid_value("continue_final_message", "cannot be used: the chat template drops the final message.")
    if text.startswith(CONTINUE_TAG, position):
        return text[:position]
    # The template trims messages, so it would also have trimmed the end of this one.
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
    """{% generation %} marks the assistant's text for training; it renders as its content."""

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
    """Replaces jinja2's own filter, which escapes HTML characters; prompts must have them unescaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

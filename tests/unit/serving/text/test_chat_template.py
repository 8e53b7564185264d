import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from loraserve.serving.errors import ServingError
from loraserve.serving.text.chat_template import ChatTemplate
from loraserve.serving.text.conversation import ChatMessage, Conversation, JsonObject, ReasoningEffort, ToolCall
from tests.support.fake_engine_client import CHAT_TEMPLATE

CHATML = """
{%- if messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content | trim -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content | tojson(indent=2) -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
CHAT = [
    ChatMessage("system", "Be <brief> & kind."),
    ChatMessage("user", 'Say "grüß dich" 🙂'),
    ChatMessage("assistant", " Hello, "),
]


def theirs(template: str, messages: list[ChatMessage], add_generation_prompt: bool, continue_final: bool) -> str:
    chat = [{"role": message.role, "content": message.content} for message in messages]
    rendered, _ = render_jinja_template(
        [chat],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final,
        **SPECIAL,
    )
    return rendered[0]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHATML])
@pytest.mark.parametrize(("add", "continue_final"), [(True, False), (False, False), (False, True)])
def test_renders_as_transformers_does(template: str, add: bool, continue_final: bool) -> None:
    ours = ChatTemplate(template, SPECIAL).render(Conversation(CHAT, add, continue_final))
    assert ours == theirs(template, CHAT, add, continue_final)


PARTS = """
{%- for message in messages -%}
    {{- '<' + message.role + '>' -}}
    {%- for part in message['content'] -%}
        {%- if part['type'] == 'image' -%}<image>{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
    {%- endfor -%}
    {{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""


@pytest.mark.parametrize(
    ("add", "continue_final", "expected"),
    [
        (True, False, "<system>Be <brief> & kind.<|eos|><user>Hi<|eos|><assistant> Hello, <|eos|><assistant>"),
        (False, True, "<system>Be <brief> & kind.<|eos|><user>Hi<|eos|><assistant> Hello, "),
    ],
)
def test_a_template_that_expects_parts_gets_them(add: bool, continue_final: bool, expected: str) -> None:
    messages = [CHAT[0], ChatMessage("user", "Hi"), CHAT[2]]
    assert ChatTemplate(PARTS, SPECIAL).render(Conversation(messages, add, continue_final)) == expected


def test_a_template_of_parts_gets_an_empty_one_for_a_message_without_content() -> None:
    template = ChatTemplate(PARTS + "{# tool_calls #}", SPECIAL)
    message = ChatMessage("assistant", None, tool_calls=(ToolCall("1", "f", "{}"),))
    assert template.render(Conversation([message], add_generation_prompt=False)) == "<assistant><|eos|>"


@pytest.mark.parametrize(
    "needed",
    [
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}",
        "{% if add_generation_prompt is not defined or tools is not defined %}{{ nothing.at_all }}{% endif %}",
        "{% filter upper %}",
    ],
)
def test_a_template_of_parts_is_recognized_whatever_else_it_needs(needed: str) -> None:
    ending = "{% endfilter %}" if "filter" in needed else ""
    text = ChatTemplate(needed + PARTS + ending, SPECIAL).render(Conversation(CHAT[:2]))
    assert "grüß dich".upper() in text.upper()


def test_a_template_that_accepts_both_gets_text() -> None:
    both = "{% for m in messages %}{{ 'text' if m.content is string else 'parts' }} {{ m.content }}{% endfor %}"
    assert ChatTemplate(both, SPECIAL).render(Conversation([ChatMessage("user", "Hi")])) == "text Hi"


def test_an_exception_raised_by_the_template_is_a_client_error() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, SPECIAL)
    with pytest.raises(ServingError, match="no such role") as caught:
        template.render(Conversation([ChatMessage("tool", "x")]))
    assert caught.value.param == "messages"


def test_developer_becomes_system_if_the_template_does_not_know_it() -> None:
    chat = Conversation([ChatMessage("developer", "x")], add_generation_prompt=False)
    text = ChatTemplate(CHAT_TEMPLATE, SPECIAL).render(chat)
    assert text == "<|bos|><|system|>x<|end|>\n"
    knows = ChatTemplate("{{ messages[0].role }} {# developer #}", SPECIAL)
    assert knows.render(chat) == "developer "


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ undefined_function() }}",
    ],
)
def test_the_sandbox_refuses_unsafe_templates(template: str) -> None:
    with pytest.raises(ServingError):
        ChatTemplate(template, SPECIAL).render(Conversation([ChatMessage("user", "x")]))


def test_templates_have_strftime_now_and_unescaped_json() -> None:
    template = ChatTemplate("{{ strftime_now('%Y')[:2] }}{{ messages[0].content | tojson }}", SPECIAL)
    text = template.render(Conversation([ChatMessage("user", "<é>")]))
    assert text == '20"<é>"'


TOOLS: list[JsonObject] = [{"type": "function", "function": {"name": "add", "description": "Adds <two>, é."}}]
TOOL_TEMPLATE = """
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if not style is defined %}{% set style = 'plain' %}{% endif %}
{{- style }}
{%- if tools is not none %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.content is not none %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- call.id + call.type + call.function.name + (call.function.arguments | tojson) }}
    {%- endfor %}
    {%- if message.tool_call_id is defined %}{{ message.tool_call_id }}{% endif %}
{%- endfor %}
"""
CALLING = [
    ChatMessage("user", "2 + 0.50?"),
    ChatMessage("assistant", None, tool_calls=(ToolCall("abcdefghi", "add", '{"b": "é<", "a": [2, 0.50]}'),)),
    ChatMessage("tool", "2.5", tool_call_id="abcdefghi"),
]


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("variables", [{}, {"style": {"of": ["cité"]}}])
def test_tools_calls_and_variables_are_rendered_as_transformers_does(
    tools: list[JsonObject], variables: JsonObject
) -> None:
    called = {"name": "add", "arguments": {"b": "é<", "a": [2, 0.5]}}
    chat = [
        {"role": "user", "content": "2 + 0.50?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": called}],
        },
        {"role": "tool", "content": "2.5", "tool_call_id": "abcdefghi"},
    ]
    expected, _ = render_jinja_template([chat], tools=tools or None, chat_template=TOOL_TEMPLATE, **variables)
    ours = ChatTemplate(TOOL_TEMPLATE, SPECIAL).render(Conversation(CALLING, tools=tools, template_kwargs=variables))
    assert ours == expected[0]


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "tokenize",
        "chat_template",
        "return_dict",
        "raise_exception",
        "strftime_now",
        "namespace",
    ],
)
def test_variables_reserved_for_the_server_are_refused_by_name(name: str) -> None:
    template = ChatTemplate(TOOL_TEMPLATE, SPECIAL)
    with pytest.raises(ServingError) as caught:
        template.render(Conversation(CALLING, template_kwargs={name: 1}))
    assert caught.value.param == f"chat_template_kwargs.{name}"
    assert name in caught.value.message


def test_any_other_name_may_be_a_variable() -> None:
    chat = Conversation([ChatMessage("user", "x")], template_kwargs={"self": 1, "no name": 2, "": 3, "style": "x"})
    assert ChatTemplate(TOOL_TEMPLATE, SPECIAL).render(chat) == "x<|user|>x"


def test_tools_are_refused_if_the_template_does_not_show_them() -> None:
    mute = ChatTemplate("{# tools #}{{ messages[0].content }}{{ messages[0].tools }}", SPECIAL)
    with pytest.raises(ServingError, match="chat template does not support tools") as caught:
        mute.render(Conversation([ChatMessage("user", "x")], tools=TOOLS))
    assert caught.value.param == "tools"
    with pytest.raises(ServingError, match="tool calls"):
        mute.render(Conversation(CALLING))


@pytest.mark.parametrize("arguments", ['{"a": 1', '{"a": 1e999}'])
def test_arguments_that_are_not_json_are_shown_verbatim(arguments: str) -> None:
    calling = [ChatMessage("assistant", "", tool_calls=(ToolCall("abcdefghi", "add", arguments),))]
    template = "{# tools #}{% for call in messages[0].tool_calls %}{{ call.function.arguments }}{% endfor %}"
    assert ChatTemplate(template, SPECIAL).render(Conversation(calling)) == arguments
    with pytest.raises(ServingError, match="messages"):
        ChatTemplate(f"{template}{{{{ call.function.arguments.a }}}}", SPECIAL).render(Conversation(calling))


def test_reasoning_effort_is_passed_in_the_variable_that_the_template_uses() -> None:
    def rendered(template: str, effort: str | None, **kwargs: bool) -> str:
        asked = None if effort is None else ReasoningEffort("reasoning_effort", effort)
        conversation = Conversation([ChatMessage("user", "x")], effort=asked, template_kwargs=kwargs)
        return ChatTemplate(template, SPECIAL).render(conversation)

    knows_effort = "{{ reasoning_effort | default('medium') }}"
    knows_thinking = "{{ enable_thinking | default(true) }}"
    assert [rendered(knows_effort, effort) for effort in (None, "none", "high")] == ["medium", "none", "high"]
    assert [rendered(knows_thinking, effort) for effort in (None, "none")] == ["True", "False"]
    assert rendered(knows_thinking, "none", enable_thinking=True) == "True"
    assert rendered("x", "none") == "x"
    for template in (knows_thinking, "x"):
        with pytest.raises(ServingError, match="'high'; the model's chat template takes no reasoning effort") as caught:
            rendered(template, "high")
        assert caught.value.param == "reasoning_effort"


def test_a_default_effort_is_passed_only_to_a_template_that_uses_it() -> None:
    asked = Conversation([ChatMessage("user", "x")], effort=ReasoningEffort("e", "high", is_default=True))
    for template, shown in (
        ("{{ reasoning_effort }}", "high"),
        ("{{ enable_thinking | default('x') }}", "x"),
        ("", ""),
    ):
        assert ChatTemplate(template, SPECIAL).render(asked) == shown


def test_template_errors_name_the_requests_own_parameter() -> None:
    for template in ("{{ raise_exception('no') }}", "{{ 1 / 0 }}", "no calls"):
        with pytest.raises(ServingError) as caught:
            ChatTemplate(template, SPECIAL).render(Conversation(CALLING, param="input"))
        assert caught.value.param == "input"

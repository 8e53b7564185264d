import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from loraserve.serving.chat_template import ChatMessage, ChatTemplate
from loraserve.serving.errors import ServingError
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
    ours = ChatTemplate(template, SPECIAL).render(
        CHAT, add_generation_prompt=add, continue_final_message=continue_final
    )
    assert ours == theirs(template, CHAT, add, continue_final)


def test_what_the_template_refuses_is_the_clients_error() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, SPECIAL)
    with pytest.raises(ServingError, match="no such role") as caught:
        template.render([ChatMessage("tool", "x")], add_generation_prompt=True, continue_final_message=False)
    assert caught.value.param == "messages"


def test_developer_becomes_system_where_the_template_does_not_know_it() -> None:
    text = ChatTemplate(CHAT_TEMPLATE, SPECIAL).render(
        [ChatMessage("developer", "x")], add_generation_prompt=False, continue_final_message=False
    )
    assert text == "<|bos|><|system|>x<|end|>\n"
    knows = ChatTemplate("{{ messages[0].role }} {# developer #}", SPECIAL)
    assert knows.render([ChatMessage("developer", "x")], add_generation_prompt=False, continue_final_message=False) == (
        "developer "
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ undefined_function() }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(ServingError):
        ChatTemplate(template, SPECIAL).render(
            [ChatMessage("user", "x")], add_generation_prompt=False, continue_final_message=False
        )


def test_strftime_now_and_unicode_json() -> None:
    template = ChatTemplate("{{ strftime_now('%Y')[:2] }}{{ messages[0].content | tojson }}", SPECIAL)
    text = template.render([ChatMessage("user", "<é>")], add_generation_prompt=False, continue_final_message=False)
    assert text == '20"<é>"'

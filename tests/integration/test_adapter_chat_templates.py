"""Chats of adapters that name one of the operator's chat templates, over HTTP, with a fake engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraserve.engine.request import EngineRequest
from loraserve.serving.text.harmony import MARKS as HARMONY_MARKS
from loraserve.serving.text.named_template import NamedChatTemplate
from loraserve.serving.text.reasoning import ReasoningFormat
from tests.support.fake_engine_client import FakeEngine, make_model, make_tokenizer
from tests.support.live_server import LiveServer, live_server, make_settings, register

TOKENIZER = make_tokenizer()
END = TOKENIZER.token_to_id("<|end|>")
EOS = 1
OWN = "{{ bos_token }}{% for message in messages %}[{{ message.content }}]{% endfor %}"
TEMPLATES = [
    NamedChatTemplate(name="brackets", source=OWN, stop_tokens=["<|end|>"]),
    NamedChatTemplate(name="endless", source=OWN.replace("[", "(").replace("]", ")")),
]
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 50},
}


def says_hi_and_goes_on(request: EngineRequest, index: int) -> list[int]:
    """Like the engine, stops after the first token that ends the answer."""
    said = [*TOKENIZER.encode("hi", add_special_tokens=False).ids, END, *tokens("more"), EOS]
    ends = {EOS, *request.sampling.stop_token_ids}
    return said[: next(place for place, token in enumerate(said) if token in ends) + 1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Adapters are named after their templates; "sql" has none."""
    settings = make_settings(tmp_path_factory.mktemp("data"), adapter_chat_templates=TEMPLATES)
    model = make_model(TOKENIZER, turn_end_ids={"<|end|>": END})
    with live_server(FakeEngine(model, says_hi_and_goes_on), settings, ("sql",)) as server:
        for name in ("brackets", "endless", "elsewhere"):
            server.run(register(server.control, server.engine, name, chat_template=name))
        yield server


def post(server: LiveServer, path: str, model: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": model, **BODIES.get(path, {}), **fields}, timeout=30)


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def text_in(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"]
    blocks = answer["output"][0]["content"] if "output" in answer else answer["content"]
    return blocks[0]["text"]


@pytest.mark.parametrize("path", BODIES)
def test_a_chat_is_rendered_with_the_template_that_its_adapter_names(server: LiveServer, path: str) -> None:
    for model, prompt in (("brackets", "<|bos|>[hello]"), ("endless", "<|bos|>(hello)")):
        assert post(server, path, model).status_code == 200
        assert server.engine.requests[-1].prompt_token_ids == tokens(prompt)
    for model in ("sql", "tiny"):
        assert post(server, path, model).status_code == 200
        assert server.engine.requests[-1].prompt_token_ids == tokens("<|bos|><|user|>hello<|end|>\n<|assistant|>")


def test_a_version_says_whether_the_server_lacks_its_template(server: LiveServer) -> None:
    for name, template, is_missing in (
        ("brackets", "brackets", False),
        ("elsewhere", "elsewhere", True),
        ("sql", None, False),
    ):
        (version,) = httpx.get(f"{server.url}/v1/adapters/{name}", headers={"X-Tenant": "shared"}).json()["versions"]
        assert (version["chat_template"], version["chat_template_missing"]) == (template, is_missing)


@pytest.mark.parametrize("path", BODIES)
def test_the_templates_stop_tokens_end_the_answer(server: LiveServer, path: str) -> None:
    assert text_in(post(server, path, "brackets").json()) == "hi"
    assert server.engine.requests[-1].sampling.stop_token_ids == (END,)
    for model in ("endless", "sql", "tiny"):
        assert text_in(post(server, path, model).json()) == "himore"


@pytest.mark.parametrize("model", ["endless", "sql", "tiny"])
def test_answers_under_a_grammar_end_at_turn_end_tokens_for_every_model(server: LiveServer, model: str) -> None:
    """The engine accepts these tokens as ends of the grammar."""
    fields = {"structured_outputs": {"regex": "[a-z]+"}, "skip_special_tokens": False}
    for path, more in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "hello"})):
        choice = post(server, path, model, **fields, **more).json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert (text, choice["finish_reason"], choice["stop_reason"]) == ("hi", "stop", None)
        assert server.engine.requests[-1].sampling.stop_token_ids == (END,)


def test_a_template_stop_token_behaves_like_eos(server: LiveServer) -> None:
    choice = post(server, "/v1/chat/completions", "brackets").json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert post(server, "/v1/chat/completions", "brackets", ignore_eos=True, max_tokens=3).status_code == 200
    assert server.engine.requests[-1].sampling.stop_token_ids == ()
    choice = post(server, "/v1/chat/completions", "brackets", stop_token_ids=[END]).json()["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("hi", END)
    for model, text in (("brackets", "hi"), ("endless", "himore")):
        streamed = post(server, "/v1/chat/completions", model, stream=True).text
        events = [
            json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: {")
        ]
        deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        assert "".join(deltas) == text


def test_the_template_does_not_affect_plain_completions(server: LiveServer) -> None:
    answer = post(server, "/v1/completions", "brackets", prompt="hello").json()
    assert server.engine.requests[-1].prompt_token_ids == tokens("<|bos|>hello")
    assert answer["choices"][0]["text"] == "himore"


def test_lorax_generate_applies_the_adapters_template_on_request(server: LiveServer) -> None:
    for parameters, prompt, text in (
        ({"apply_chat_template": True}, "<|bos|>[hello]", "hi"),
        ({}, "<|bos|>hello", "himore"),
    ):
        body = {"inputs": "hello", "parameters": {"adapter_id": "brackets", **parameters}}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=30)
        assert answer.json()["generated_text"] == text
        assert server.engine.requests[-1].prompt_token_ids == tokens(prompt)


def test_tokenize_and_count_tokens_use_the_adapters_template(server: LiveServer) -> None:
    counted = httpx.post(f"{server.url}/tokenize", json={"model": "brackets", "messages": MESSAGES}).json()
    assert counted["tokens"] == tokens("<|bos|>[hello]")
    counted = httpx.post(f"{server.url}/tokenize", json={"messages": MESSAGES}).json()
    assert counted["count"] == len(tokens("<|bos|><|user|>hello<|end|>\n<|assistant|>"))
    body = {"model": "brackets", "messages": MESSAGES}
    counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body).json()
    assert counted["input_tokens"] == len(tokens("<|bos|>[hello]"))


@pytest.mark.parametrize("path", BODIES)
def test_a_template_missing_on_this_server_is_named_in_the_error(server: LiveServer, path: str) -> None:
    """As after a restart without that template."""
    answer = post(server, path, "elsewhere")
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    assert (
        "The adapter's chat template 'elsewhere' is not available on this server." in answer.json()["error"]["message"]
    )
    assert "--adapter-chat-templates" in answer.json()["error"]["message"]
    assert post(server, "/v1/completions", "elsewhere", prompt="hello").status_code == 200


def test_models_and_versions_report_their_chat_template(server: LiveServer) -> None:
    models = {model["id"]: model for model in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert models["brackets"]["adapter"]["chat_template"] == "brackets"
    assert "chat_template" not in models["sql"]["adapter"]
    assert models["tiny"]["adapter_chat_templates"] == ["brackets", "endless"]
    assert "adapter_chat_templates" not in models["sql"]
    one = httpx.get(f"{server.url}/v1/models/endless").json()
    assert one["adapter"]["chat_template"] == "endless"
    for name, expected in (("brackets", "brackets"), ("sql", None)):
        detail = httpx.get(f"{server.url}/v1/adapters/{name}").json()
        assert [version["chat_template"] for version in detail["versions"]] == [expected]


@pytest.mark.parametrize("path", [*BODIES, "/generate"])
def test_a_version_published_during_a_request_brings_its_own_template(server: LiveServer, path: str) -> None:
    """The template is that of the version whose weights answer, not of the version that was live on arrival."""
    name = f"moving{path.replace('/', '-')}"
    server.run(register(server.control, server.engine, name, content=f"{name} 1", chat_template="endless"))
    resolve = server.control.resolver.resolve

    async def outdated(*args: Any, **kwargs: Any) -> Any:
        target = await resolve(*args, **kwargs)
        await register(server.control, server.engine, name, content=f"{name} 2", chat_template="brackets")
        return target

    server.control.resolver.resolve = outdated
    try:
        body = {"inputs": "hello", "parameters": {"adapter_id": name, "apply_chat_template": True}}
        answer = httpx.post(f"{server.url}{path}", json=body) if path == "/generate" else post(server, path, name)
    finally:
        server.control.resolver.resolve = resolve
    assert answer.headers["x-adapter-version"] == "2"
    newest = server.engine.requests[-1]
    assert (newest.prompt_token_ids, newest.sampling.stop_token_ids) == (tokens("<|bos|>[hello]"), (END,))


def test_answers_begin_with_reasoning_only_if_the_template_has_a_reasoning_mark(tmp_path: Path) -> None:
    """With a parser that expects every answer to begin with reasoning."""
    templates = [
        NamedChatTemplate(name="plain", source=OWN),
        NamedChatTemplate(name="thinks", source=OWN + "{% set mark = '</think>' %}"),
    ]
    reasoning_parser = ReasoningFormat.DEEPSEEK_R1
    settings = make_settings(tmp_path, adapter_chat_templates=templates, reasoning_parser=reasoning_parser)
    with live_server(FakeEngine(make_model(TOKENIZER), says_hi_and_goes_on), settings, ("sql",)) as server:
        for name in ("plain", "thinks"):
            server.run(register(server.control, server.engine, name, chat_template=name))
        said = {
            model: post(server, "/v1/chat/completions", model).json()["choices"][0]["message"]
            for model in ("plain", "thinks", "sql", "tiny")
        }
    assert {model: message["content"] for model, message in said.items()} == {
        "plain": "himore",
        "thinks": None,
        "sql": None,
        "tiny": None,
    }
    assert [said[model]["reasoning_content"] for model in ("thinks", "sql", "tiny")] == ["himore"] * 3


def test_harmony_rules_apply_only_to_harmony_templates(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([*HARMONY_MARKS])
    tokenizer.add_tokens(["final"])
    harmony = OWN + "{% if false %}<|channel|>{{ message.thinking }}{% endif %}"
    templates = [NamedChatTemplate(name="plain", source=OWN), NamedChatTemplate(name="harmony", source=harmony)]
    settings = make_settings(tmp_path, adapter_chat_templates=templates, reasoning_parser=ReasoningFormat.OPENAI_GPTOSS)
    with live_server(FakeEngine(make_model(tokenizer), says_hi_and_goes_on), settings) as server:
        for name in ("plain", "harmony"):
            server.run(register(server.control, server.engine, name, chat_template=name))
        for model, prompt in (("plain", "<|bos|>[hello]"), ("harmony", "<|bos|>[hello]<|channel|>final<|message|>")):
            post(server, "/v1/chat/completions", model, response_format={"type": "json_object"})
            assert server.engine.requests[-1].prompt_token_ids == tokenizer.encode(prompt, add_special_tokens=False).ids
        for model, status in (("plain", 200), ("harmony", 400)):
            assert post(server, "/v1/chat/completions", model, reasoning_effort="none").status_code == status

"""Activated adapters, which take effect at their invocation, on a running server with the openai client."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.adapter_variants import variant
from tests.support.demo_questions import BASE, templated, user

INVOCATIONS = {"activated-judge": " judge:", "activated-turn": "<|assistant|>"}
"""The chat template puts the second one before an answer."""
CONTEXT = f"{templated('a text that fills a few blocks of sixteen tokens, which are bytes here')}It is."


def token_ids(http: httpx.Client, text: str) -> list[int]:
    return http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]


@pytest.fixture(scope="module", autouse=True)
def adapters(http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    for name, text in INVOCATIONS.items():
        invocation = token_ids(http, text)
        folder = variant(
            tmp_path_factory.mktemp("adapter") / name,
            "uppercase",
            lambda config, ids=invocation: config.update(alora_invocation_tokens=ids),
        )
        answer = http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
        assert answer.status_code == 200, answer.text
    yield
    for name in INVOCATIONS:
        http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def complete(client: openai.OpenAI, model: str, prompt: str) -> tuple[str, int]:
    """(Text, number of cached prompt tokens)."""
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.parametrize("name", INVOCATIONS)
def test_the_invocation_of_an_activated_adapter_is_reported(
    client: openai.OpenAI, http: httpx.Client, name: str
) -> None:
    text = INVOCATIONS[name]
    expected = {"token_ids": token_ids(http, text), "text": text}
    cards = {card.id: card.model_dump()["adapter"] for card in client.models.list() if card.id != BASE}
    assert cards[name]["invocation"] == client.models.retrieve(name).model_dump()["adapter"]["invocation"] == expected
    assert "invocation" not in cards["uppercase"]
    for adapter, invocation in ((name, expected), ("uppercase", None)):
        (version,) = http.get(f"/v1/adapters/{adapter}/versions").json()["data"]
        assert version["invocation"] == invocation


def test_an_activated_adapter_reuses_the_prefix_cached_by_the_base_model(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    asked = CONTEXT + INVOCATIONS["activated-judge"]
    complete(client, BASE, CONTEXT)
    answered, num_cached = complete(client, "activated-judge", asked)
    assert num_cached == len(token_ids(http, CONTEXT)) // 16 * 16 > 48
    assert complete(client, "uppercase", asked)[1] == 0
    assert answered != complete(client, BASE, asked)[0]


def test_a_chat_is_activated_if_its_template_contains_the_invocation(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="activated-turn", messages=user("hello world"), temperature=0, max_tokens=12
    )
    assert chat.choices[0].message.content == complete(client, "activated-turn", templated("hello world"))[0]


def test_a_prompt_without_the_invocation_is_refused(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="activated-judge", messages=user("hello"))
    assert refused.value.code == "adapter_not_activated"
    for said in ("'activated-judge'", "' judge:'", str(list(b" judge:"))):
        assert said in refused.value.message
    many = http.post("/v1/completions", json={"model": "activated-judge", "prompt": ["a judge:", "a judge"]})
    streamed = http.post("/v1/completions", json={"model": "activated-judge", "prompt": "judge:", "stream": True})
    for answer in (many, streamed):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_not_activated")


def test_an_invocation_outside_the_vocabulary_is_refused(http: httpx.Client, tmp_path: Path) -> None:
    folder = variant(tmp_path / "outside", "uppercase", lambda config: config.update(alora_invocation_tokens=[9999]))
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "outside", "lora_path": str(folder)})
    assert answer.status_code == 400
    assert "alora_invocation_tokens: token id 9999 is outside the vocabulary" in answer.json()["error"]["message"]

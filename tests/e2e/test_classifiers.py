"""Classifiers on a running server, with the openai client, compared with PEFT."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from peft import PeftModel

from tests.support.adapter_variants import classifier
from tests.support.demo_questions import ADAPTER_DIR, BASE, user
from tests.support.server_process import ServerProcess, run_command
from tests.support.tiny_adapters import load_classifier

LABELS = ["billing", "login", "<b>other</b>"]
TEXTS = ["My invoice is wrong", "I cannot log in", "12 + 30", "HELLO"]
NAME = "intent"
ROUNDING = 0.05
"""Tolerance, relative to the largest |number|: the demo computes in bfloat16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(tmp_path_factory.mktemp("adapter") / NAME, "reverse", LABELS)


@pytest.fixture(scope="module", autouse=True)
def adapter(http: httpx.Client, folder: Path) -> Iterator[None]:
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": NAME, "lora_path": str(folder)})
    assert answer.status_code == 200, answer.text
    yield
    http.post("/v1/unload_lora_adapter", json={"lora_name": NAME})


def classify(client: openai.OpenAI, **fields: Any) -> list[dict[str, Any]]:
    answer: Any = client.post("/classify", cast_to=object, body={"model": NAME, "input": TEXTS} | fields)
    return answer["data"]


def test_logits_match_peft(client: openai.OpenAI, http: httpx.Client, folder: Path) -> None:
    peft_model = PeftModel.from_pretrained(
        load_classifier(ADAPTER_DIR.parent / "model", len(LABELS)), str(folder)
    ).eval()
    items = classify(client, use_activation=False)
    for text, item in zip(TEXTS, items, strict=True):
        token_ids = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        with torch.inference_mode():
            expected = peft_model(input_ids=torch.tensor([token_ids])).logits[0]
        difference = (torch.tensor(item["probs"]) - expected).abs().max() / expected.abs().max()
        assert difference < ROUNDING, text
        assert item["label"] == LABELS[int(expected.argmax())]
        assert item["num_classes"] == len(LABELS)
    assert len({item["label"] for item in items}) > 1


def test_probabilities_are_a_softmax_over_all_labels(client: openai.OpenAI) -> None:
    numbers = torch.tensor([item["probs"] for item in classify(client, use_activation=False)])
    probabilities = torch.tensor([item["probs"] for item in classify(client)])
    assert torch.allclose(probabilities, torch.softmax(numbers, dim=-1), atol=0.01)
    assert torch.allclose(probabilities.sum(dim=-1), torch.ones(len(TEXTS)), atol=1e-5)


def test_a_classifier_is_reported_as_such_and_cannot_generate_text(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    card = client.models.retrieve(NAME).model_dump()["adapter"]
    assert card["classifier"] == {"num_labels": 3, "labels": LABELS, "problem_type": None, "score_template": None}
    shown = run_command("adapter", "show", NAME, "--url", server.url)
    assert "3: billing, login, <b>other</b>" in shown.stdout
    with pytest.raises(openai.BadRequestError, match="a classifier, which cannot generate text"):
        client.chat.completions.create(model=NAME, messages=user("hi"))
    for model in (BASE, "reverse"):
        with pytest.raises(openai.BadRequestError, match="not a classifier"):
            classify(client, model=model)

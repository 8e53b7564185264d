"""Rerankers on a running server, compared with PEFT."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel

from tests.support.adapter_variants import classifier
from tests.support.demo_questions import ADAPTER_DIR
from tests.support.tiny_adapters import load_classifier

QUERY = "where is my money?"
DOCUMENTS = ["we pay back within 14 days", "the shop is closed on sunday", "HELLO", "12 + 30 = 42"]
TEMPLATE = "<|user|>query: {query}\ndocument: {document}<|end|>"
ROUNDING = 0.05
"""Tolerance, relative to the largest |number|: the demo computes in bfloat16. At least as much as PEFT's own error in
bfloat16: which way values are rounded depends on the CPU's instructions."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    templates = {"plain-ranker": None, "ranker": TEMPLATE}
    return {name: classifier(folder / name, "reverse", ["relevant"], template) for name, template in templates.items()}


@pytest.fixture(scope="module", autouse=True)
def adapters(http: httpx.Client, folders: dict[str, Path]) -> Iterator[None]:
    for name, folder in folders.items():
        answer = http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
        assert answer.status_code == 200, answer.text
    yield
    for name in folders:
        http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def ask(http: httpx.Client, path: str, **fields: Any) -> Any:
    answer = http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def scores(model: PeftModel, inputs: list[torch.Tensor]) -> list[float]:
    with torch.inference_mode():
        return [float(model(input_ids=token_ids).logits[0, 0]) for token_ids in inputs]


@pytest.mark.parametrize("name", ["plain-ranker", "ranker"])
def test_scores_and_rankings_match_peft(http: httpx.Client, folders: dict[str, Path], name: str) -> None:
    peft_model = PeftModel.from_pretrained(load_classifier(ADAPTER_DIR.parent / "model", 1), str(folders[name])).eval()
    inputs = []
    for document in DOCUMENTS:
        # The demo's tokenizer adds nothing around a text.
        prompt = QUERY + document if name == "plain-ranker" else f"<|user|>query: {QUERY}\ndocument: {document}<|end|>"
        inputs.append(torch.tensor([ask(http, "/tokenize", prompt=prompt)["tokens"]]))
    expected = scores(peft_model, inputs)
    rounded = scores(peft_model.bfloat16(), inputs)
    numbers = ask(http, "/v1/score", model=name, queries=QUERY, documents=DOCUMENTS, use_activation=False)["data"]
    own_error = max(abs(a - b) for a, b in zip(rounded, expected, strict=True))
    tolerance = max(ROUNDING * max(map(abs, expected)), own_error)
    assert tolerance < 0.1 * (max(expected) - min(expected)), "it could not tell documents apart"
    for number, right in zip(numbers, expected, strict=True):
        assert abs(number["score"] - right) < tolerance
    results = ask(http, "/v1/rerank", model=name, query=QUERY, documents=DOCUMENTS)["results"]
    by_document = {result["index"]: result["relevance_score"] for result in results}
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -by_document[index])
    assert [result["index"] for result in results] == order
    for number, index in zip(numbers, range(len(DOCUMENTS)), strict=True):
        probability = float(torch.sigmoid(torch.tensor(number["score"])))
        assert by_document[index] == pytest.approx(probability, abs=0.01)
    (best,) = ask(http, "/v1/rerank", model=name, query=QUERY, documents=DOCUMENTS, top_n=1)["results"]
    assert (best["index"], best["document"]) == (order[0], {"text": DOCUMENTS[order[0]]})


def test_a_rerankers_card_shows_its_score_template(http: httpx.Client) -> None:
    for name, template in (("ranker", TEMPLATE), ("plain-ranker", None)):
        card = http.get(f"/v1/models/{name}").json()["adapter"]["classifier"]
        assert (card["num_labels"], card["score_template"]) == (1, template)

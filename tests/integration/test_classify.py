"""/v1/classify over HTTP, with a fake engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraserve.engine.request import EngineRequest, LabelActivation, to_classify
from loraserve.serving.settings import RequestLimits
from loraserve.store.records import ClassifierRecord
from tests.support.fake_engine_client import HIDDEN_SIZE, FakeEngine, make_tokenizer, vector_of
from tests.support.live_server import LiveServer, live_server, make_settings, register

TOKENIZER = make_tokenizer()
BOS = 0
LABELS = [f"label {number}" for number in range(HIDDEN_SIZE)]
"""As many as the fake engine returns numbers."""
CLASSIFIERS = {
    "intent": ClassifierRecord(num_labels=HIDDEN_SIZE, labels=LABELS),
    "topics": ClassifierRecord(num_labels=HIDDEN_SIZE, problem_type="multi_label_classification"),
    "stars": ClassifierRecord(num_labels=HIDDEN_SIZE, problem_type="regression"),
    "single": ClassifierRecord(num_labels=HIDDEN_SIZE, problem_type="single_label_classification"),
    "spam": ClassifierRecord(num_labels=1),
    "one": ClassifierRecord(num_labels=1, problem_type="single_label_classification"),
    "reward": ClassifierRecord(num_labels=1, problem_type="regression"),
}
TEXT_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "stream": True},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Base "tiny", a text adapter "sql" and the classifiers."""
    with live_server(FakeEngine(), make_settings(tmp_path_factory.mktemp("data")), ("sql",)) as server:
        for name, classifier in CLASSIFIERS.items():
            server.run(register(server.control, server.engine, name, classifier=classifier))
        yield server


def post(server: LiveServer, body: dict[str, Any], path: str = "/v1/classify") -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "intent", "input": "hi"} | body, timeout=30)


def newest(server: LiveServer) -> EngineRequest:
    return server.engine.requests[-1]


def tokens_of(text: str) -> list[int]:
    return [BOS, *TOKENIZER.encode(text, add_special_tokens=False).ids]


def test_each_input_gets_its_label(server: LiveServer) -> None:
    answer = post(server, {"input": ["hello world", "hi"]})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["id"] == f"classify-{answer.headers['x-request-id']}"
    assert (body["object"], body["model"]) == ("list", "intent")
    num_tokens = len(tokens_of("hello world")) + len(tokens_of("hi"))
    assert body["usage"] == {
        "prompt_tokens": num_tokens,
        "completion_tokens": 0,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    asked = {tuple(request.prompt_token_ids): request for request in server.engine.requests[-2:]}
    for index, text in enumerate(("hello world", "hi")):
        numbers = vector_of(asked[tuple(tokens_of(text))]).tolist()
        expected = {"label": LABELS[numbers.index(max(numbers))], "probs": numbers, "num_classes": HIDDEN_SIZE}
        assert body["data"][index] == {"index": index} | expected
    assert answer.headers["x-adapter-version"] == "1"
    item = httpx.get(f"{server.url}/v1/requests/{answer.headers['x-request-id']}").json()
    assert (item["route"], item["state"], item["num_output_tokens"]) == ("classify", "stop", 0)


def test_every_path_and_model_name_reaches_the_classifier(server: LiveServer) -> None:
    data = post(server, {}).json()["data"]
    assert post(server, {}, "/classify").json()["data"] == data  # vLLM's path
    assert post(server, {"model": "tiny:intent@v1"}).json()["data"] == data
    by_path = httpx.post(f"{server.url}/adapters/intent/v1/classify", json={"input": "hi"})
    assert by_path.json()["data"] == data


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("intent", LabelActivation.SOFTMAX),
        ("single", LabelActivation.SOFTMAX),
        ("topics", LabelActivation.SIGMOID),
        ("spam", LabelActivation.SIGMOID),
        ("one", LabelActivation.SIGMOID),
        ("reward", LabelActivation.NONE),
        ("stars", LabelActivation.NONE),
    ],
)
def test_the_problem_type_and_number_of_labels_select_the_activation(
    server: LiveServer, name: str, activation: LabelActivation
) -> None:
    for use_activation in (None, True):
        assert post(server, {"model": name, "use_activation": use_activation}).status_code == 200
        assert newest(server).pooling == to_classify(activation)
    assert post(server, {"model": name, "use_activation": False}).status_code == 200
    assert newest(server).pooling == to_classify(LabelActivation.NONE)


def test_labels_without_names_are_numbered(server: LiveServer) -> None:
    (item,) = post(server, {"model": "topics"}).json()["data"]
    numbers = item["probs"]
    assert item["label"] == f"LABEL_{numbers.index(max(numbers))}"


@pytest.mark.parametrize(
    ("body", "param", "named"),
    [
        ({"model": "tiny"}, "model", "the base model, which is not a classifier"),
        ({"model": "sql"}, "model", "'sql' (version 1), which is not a classifier (task_type SEQ_CLS)"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages", "Send their text with 'input'"),
        ({"input": ["hi"] * 2049}, "input", "2049"),
        ({"dimensions": 2}, "dimensions", "dimensions"),
        ({"use_activation": "yes"}, "use_activation", "bool"),
    ],
)
def test_invalid_requests_are_refused_and_name_the_parameter(
    server: LiveServer, body: dict[str, Any], param: str, named: str
) -> None:
    answer = post(server, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert named in error["message"]


@pytest.mark.parametrize("path", TEXT_BODIES)
def test_a_classifier_cannot_generate_text(server: LiveServer, path: str) -> None:
    answer = httpx.post(f"{server.url}{path}", json={"model": "intent", **TEXT_BODIES[path]})
    assert answer.status_code == 400
    assert "'intent' (version 1), a classifier, which cannot generate text. POST /v1/classify" in answer.text


def test_a_classifier_can_compute_embeddings(server: LiveServer) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"model": "intent", "input": "hi"})
    assert answer.status_code == 200
    pooling = newest(server).pooling
    assert pooling is not None
    assert pooling.labels is None


def test_models_and_versions_list_the_classifiers_labels(server: LiveServer) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
    expected = {"num_labels": HIDDEN_SIZE, "labels": LABELS, "problem_type": None, "score_template": None}
    assert cards["intent"]["adapter"]["classifier"] == {"num_labels": HIDDEN_SIZE, "problem_type": None}
    assert cards["topics"]["adapter"]["classifier"]["problem_type"] == "multi_label_classification"
    assert "classifier" not in cards["sql"]["adapter"]
    assert httpx.get(f"{server.url}/v1/models/intent").json()["adapter"]["classifier"] == expected
    for name, classifier in (("intent", expected), ("sql", None)):
        headers = {"x-tenant": "shared"}
        (version,) = httpx.get(f"{server.url}/v1/adapters/{name}/versions", headers=headers).json()["data"]
        assert version["classifier"] == classifier


def test_a_version_published_during_a_request_brings_its_own_labels(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is admitted with the new version, whose head is another."""
    admit = server.context.calls.admission.admit
    names = [f"new {number}" for number in range(HIDDEN_SIZE)]
    newer = ClassifierRecord(num_labels=HIDDEN_SIZE, labels=names, problem_type="regression")

    async def admit_later(*args: Any, **options: Any) -> Any:
        await register(server.control, server.engine, "single", content="newer", classifier=newer)
        return await admit(*args, **options)

    monkeypatch.setattr(server.context.calls.admission, "admit", admit_later)
    answer = post(server, {"model": "single"})
    assert answer.headers["x-adapter-version"] == "2"
    assert newest(server).pooling == to_classify(LabelActivation.NONE)
    (item,) = answer.json()["data"]
    assert item["label"] in names


def test_a_version_published_during_a_request_may_have_too_many_labels(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = server.context.calls.admission.admit
    most = server.context.runtime.settings.limits.max_pooled_values

    async def admit_later(*args: Any, **options: Any) -> Any:
        newer = ClassifierRecord(num_labels=most // 2)
        await register(server.control, server.engine, "topics", content="larger", classifier=newer)
        return await admit(*args, **options)

    monkeypatch.setattr(server.context.calls.admission, "admit", admit_later)
    answer = post(server, {"model": "topics", "input": ["a", "b", "c"]})
    assert answer.status_code == 400
    assert f"the limit is {most}" in answer.json()["error"]["message"]


def test_the_numbers_in_one_answer_are_limited(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, limits=RequestLimits(max_pooled_values=3 * HIDDEN_SIZE))
    with live_server(FakeEngine(), settings) as server:
        server.run(register(server.control, server.engine, "intent", classifier=CLASSIFIERS["intent"]))
        assert post(server, {"input": ["a", "b", "c"]}).status_code == 200
        refused = post(server, {"input": ["a", "b", "c", "d"]})
        assert refused.status_code == 400
        message = f"{4 * HIDDEN_SIZE} numbers; the limit is {3 * HIDDEN_SIZE}. Send fewer at once."
        assert message in refused.json()["error"]["message"]

"""/v1/rerank and /v1/score over HTTP, with a fake engine."""

import math
from array import array
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import processors

from loraserve.engine.request import LabelActivation, to_classify
from loraserve.store.records import ClassifierRecord
from tests.support.fake_engine_client import FakeEngine, make_model, make_tokenizer, vector_of
from tests.support.live_server import LiveServer, live_server, make_settings, register

TOKENIZER = make_tokenizer()
TOKENIZER.post_processor = processors.TemplateProcessing(
    single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", 0)]
)
"""Puts different tokens around a pair than around a text, as Llama's tokenizer does."""
QUERY = "hello?"
DOCUMENTS = ["hello world", "hi", "{query} hello {document}", "adapters"]
TEMPLATE = "Q: {query} D: {document} <|end|>"
LONG_TEMPLATE = "{document}|{query}" + " " * 2128
RERANKERS = {
    "ranker": ClassifierRecord(num_labels=1),
    "templated": ClassifierRecord(num_labels=1, score_template=TEMPLATE),
    "long": ClassifierRecord(num_labels=1, score_template=LONG_TEMPLATE),
    "reward": ClassifierRecord(num_labels=1, problem_type="regression"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Base "tiny", a text adapter "sql", the rerankers, and "intent", a classifier with three labels."""
    engine = FakeEngine(make_model(TOKENIZER))
    with live_server(engine, make_settings(tmp_path_factory.mktemp("data")), ("sql",)) as server:
        for name, classifier in {**RERANKERS, "intent": ClassifierRecord(num_labels=3)}.items():
            server.run(register(server.control, server.engine, name, classifier=classifier))
        yield server


def rerank(server: LiveServer, path: str = "/v1/rerank", **fields: Any) -> httpx.Response:
    body = {"model": "ranker", "query": QUERY, "documents": DOCUMENTS} | fields
    return httpx.post(f"{server.url}{path}", json=body, timeout=30)


def score(server: LiveServer, path: str = "/v1/score", **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "ranker"} | fields, timeout=30)


def sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number))


def asked_of(server: LiveServer, answer: httpx.Response) -> list[list[int]]:
    """The prompts that the engine received, in document order."""
    assert answer.status_code == 200, answer.text
    item = httpx.get(f"{server.url}/v1/requests/{answer.headers['x-request-id']}").json()
    assert (item["state"], item["num_output_tokens"]) == ("stop", 0)
    number = len(answer.json().get("results") or answer.json()["data"])
    return [request.prompt_token_ids for request in server.engine.requests[-number:]]


def pair(query: str, document: str, *, special: bool = True) -> list[int]:
    return TOKENIZER.encode(query, document, add_special_tokens=special).ids


def text(given: str, *, special: bool = True) -> list[int]:
    return TOKENIZER.encode(given, add_special_tokens=special).ids


def test_documents_are_sorted_by_relevance_score(server: LiveServer) -> None:
    answer = rerank(server)
    prompts = [pair(QUERY, document) for document in DOCUMENTS]
    assert asked_of(server, answer) == prompts
    requests = {tuple(request.prompt_token_ids): request for request in server.engine.requests[-len(DOCUMENTS) :]}
    scores = [sigmoid(vector_of(requests[tuple(prompt)])[0]) for prompt in prompts]
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -scores[index])
    body = answer.json()
    assert order != sorted(order)
    assert body["results"] == [
        {"index": index, "relevance_score": scores[index], "document": {"text": DOCUMENTS[index]}} for index in order
    ]
    assert (body["id"], body["model"]) == (f"rerank-{answer.headers['x-request-id']}", "ranker")
    num_tokens = sum(map(len, prompts))
    assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (num_tokens, num_tokens)
    assert answer.headers["x-adapter-version"] == "1"
    assert rerank(server, top_n=2).json()["results"] == body["results"][:2]
    for top_n in (0, None, len(DOCUMENTS) + 1):
        assert rerank(server, top_n=top_n).json()["results"] == body["results"]
    bare = [{name: result[name] for name in ("index", "relevance_score")} for result in body["results"]]
    assert rerank(server, return_documents=False).json()["results"] == bare


def test_equal_documents_keep_their_order(server: LiveServer) -> None:
    assert [result["index"] for result in rerank(server, documents=["hi"] * 5).json()["results"]] == [0, 1, 2, 3, 4]


def test_every_path_model_name_and_document_form_gives_the_same_results(server: LiveServer) -> None:
    results = rerank(server).json()["results"]
    of_adapter = [f"/adapters/ranker{path}" for path in ("/v1/rerank", "/v2/rerank", "/rerank")]
    for path in ("/rerank", "/v2/rerank", *of_adapter):
        model = None if path.startswith("/adapters") else "tiny:ranker@v1"
        assert rerank(server, path, model=model).json()["results"] == results, path
    objects = [{"text": document, "id": 7} for document in DOCUMENTS]
    assert rerank(server, documents=objects, rank_fields=["text"]).json()["results"] == results
    assert (
        rerank(server, documents=[DOCUMENTS[0], *({"text": text} for text in DOCUMENTS[1:])]).json()["results"]
        == results
    )


def test_scores_are_returned_in_document_order(server: LiveServer) -> None:
    by_index = {result["index"]: result["relevance_score"] for result in rerank(server).json()["results"]}
    expected = [{"index": index, "object": "score", "score": by_index[index]} for index in range(len(DOCUMENTS))]
    answer = score(server, queries=QUERY, documents=DOCUMENTS)
    assert answer.json()["data"] == expected
    assert (answer.json()["object"], answer.json()["model"]) == ("list", "ranker")
    assert answer.json()["id"] == f"score-{answer.headers['x-request-id']}"
    for path in ("/score", "/adapters/ranker/v1/score", "/adapters/ranker/score"):
        assert score(server, path, text_1=[QUERY], text_2=DOCUMENTS).json()["data"] == expected
    (alone,) = score(server, text_1=QUERY, text_2=DOCUMENTS[1]).json()["data"]
    assert alone["score"] == by_index[1]
    item = httpx.get(f"{server.url}/v1/requests/{answer.headers['x-request-id']}").json()
    assert item["route"] == "score"


def test_each_document_may_have_its_own_query(server: LiveServer) -> None:
    answer = score(server, queries=["a", "b"], documents=["c", "d"])
    assert asked_of(server, answer) == [pair("a", "c"), pair("b", "d")]


def test_pairs_are_rendered_with_the_score_template_of_the_adapter(server: LiveServer) -> None:
    expected = [text(f"Q: {QUERY} D: {document} <|end|>") for document in DOCUMENTS]
    assert TOKENIZER.token_to_id("<|end|>") == expected[0][-1]
    assert asked_of(server, rerank(server, model="templated")) == expected
    assert asked_of(server, rerank(server, model="templated", add_special_tokens=False)) == [
        prompt[1:] for prompt in expected
    ]
    plain = rerank(server, add_special_tokens=False)
    assert asked_of(server, plain) == [pair(QUERY, document, special=False) for document in DOCUMENTS]


def test_scores_are_probabilities_unless_activation_is_off_or_it_is_a_regression(server: LiveServer) -> None:
    for name, use_activation, make in (
        ("ranker", None, sigmoid),
        ("ranker", False, float),
        ("reward", None, float),
        ("reward", True, float),
    ):
        answer = rerank(server, model=name, use_activation=use_activation, documents=["hi"])
        asked = server.engine.requests[-1]
        assert asked.pooling == to_classify(LabelActivation.NONE)
        (result,) = answer.json()["results"]
        assert result["relevance_score"] == pytest.approx(make(vector_of(asked)[0]), rel=1e-12)


def test_documents_with_large_logits_are_ranked_correctly(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As float32 probabilities the two largest would both be 1."""
    numbers = {tuple(pair(QUERY, document)): 100.0 * index - 120 for index, document in enumerate(DOCUMENTS)}
    monkeypatch.setattr(
        "tests.support.fake_engine_client.vector_of",
        lambda request: array("f", [numbers[tuple(request.prompt_token_ids)]]),
    )
    results = rerank(server).json()["results"]
    assert [result["index"] for result in results] == [3, 2, 1, 0]
    assert [result["relevance_score"] for result in results] == [
        pytest.approx(sigmoid(number), rel=1e-12) for number in (180, 80, -20, -120)
    ]


@pytest.mark.parametrize("name", ["ranker", "templated"])
def test_documents_are_truncated_and_queries_are_not(server: LiveServer, name: str) -> None:
    def prompt_of(document: str) -> list[int]:
        return pair(QUERY, document) if name == "ranker" else text(f"Q: {QUERY} D: {document} <|end|>")

    documents = ["hi", "hello world, hello adapters, héllo wörld 🙂🙂🙂 hello"]
    whole = [*map(prompt_of, documents)]
    longest = len(prompt_of("")) + 9
    assert len(whole[0]) < longest < len(whole[1])
    kept, short = asked_of(server, rerank(server, model=name, documents=documents, truncate_prompt_tokens=longest))
    assert kept == whole[0]
    beginning = next(
        documents[1][:end] for end in range(len(documents[1]), 0, -1) if len(prompt_of(documents[1][:end])) <= longest
    )
    assert short == prompt_of(beginning)
    assert asked_of(server, rerank(server, model=name, documents=documents, max_tokens_per_doc=2)) == [
        prompt_of(TOKENIZER.decode(text(document, special=False)[:2])) for document in documents
    ]
    assert asked_of(server, rerank(server, model=name, documents=documents, truncate_prompt_tokens=-1)) == whole
    assert asked_of(server, rerank(server, model=name, documents=documents, max_tokens_per_doc=4096)) == whole


def test_documents_can_be_truncated_to_the_models_maximum_length(server: LiveServer) -> None:
    most = server.engine.model.max_model_len
    for how in ({"truncate_prompt_tokens": -1}, {"max_tokens_per_doc": 4096}):
        (prompt,) = asked_of(server, rerank(server, documents=["hello " * most], **how))
        assert most - 3 <= len(prompt) <= most


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"model": "tiny"}, "model", "the base model, which is not a classifier"),
        ({"model": "sql"}, "model", "'sql' (version 1), which is not a classifier"),
        ({"model": "intent"}, "model", "'intent' (version 1), a classifier with 3 labels; ranking documents requires"),
        ({"documents": []}, "documents", "is empty"),
        ({"documents": ["hi"] * 2049}, "documents", "has 2049 documents; the limit is 2048"),
        ({"documents": [{"title": "hi"}]}, "documents[0].text", "Missing required parameter"),
        ({"query": ["a"]}, "query", "str"),
        ({"top_n": -1}, "top_n", "is -1"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc", "is 0; it must be 1 or more"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "is -2"),
        ({"truncate_prompt_tokens": 4}, "query", "have 5 tokens, which leaves no room for documents in 4"),
        ({"query": "hello " * 900}, "query", "which leaves no room for documents in 512"),
        ({"documents": ["hi", "hello " * 9999]}, "documents", "'documents[1]' and its query have"),
        ({"query": "q" * 1_100_000}, "documents", "have 4400045 bytes; the limit is"),
        ({"model": "long", "query": "é", "documents": [""] * 2048}, "documents", "have 4399104 bytes; the limit"),
        ({"rank_fields": ["title"]}, "rank_fields", "is not supported"),
        ({"max_chunks_per_doc": 3}, "max_chunks_per_doc", "is not supported"),
        ({"rank_field": ["text"]}, "rank_field", "Unknown parameter"),
    ],
)
def test_invalid_rerank_requests_are_refused_naming_the_field(
    server: LiveServer, fields: dict[str, Any], param: str, named: str
) -> None:
    answer = rerank(server, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert named in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"documents": "a"}, "queries", "Missing required parameter"),
        ({"text_1": "a"}, "documents", "Missing required parameter"),
        ({"text_1": "a", "queries": "a", "documents": "a"}, "text_1", "mean the same: send only one of them"),
        (
            {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]},
            "text_1",
            "has 2 entries for 3 in 'text_2'; send one, or one for",
        ),
        ({"text_1": [], "text_2": ["a"]}, "text_1", "has 0 entries for 1"),
        ({"text_1": "a", "text_2": ["b", 1]}, "text_2[1]", "str"),
    ],
)
def test_invalid_score_requests_are_refused_naming_the_field(
    server: LiveServer, fields: dict[str, Any], param: str, named: str
) -> None:
    answer = score(server, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert named in error["message"]


def test_a_version_published_meanwhile_gets_its_own_score_template(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = server.context.calls.admission.admit
    newer = ClassifierRecord(num_labels=1, score_template=TEMPLATE)

    async def admit_later(*args: Any, **options: Any) -> Any:
        await register(server.control, server.engine, "reward", content="newer", classifier=newer)
        return await admit(*args, **options)

    monkeypatch.setattr(server.context.calls.admission, "admit", admit_later)
    answer = rerank(server, model="reward", documents=["hi"])
    assert answer.headers["x-adapter-version"] == "2"
    assert asked_of(server, answer) == [text(f"Q: {QUERY} D: hi <|end|>")]

"""Answers constrained by schemas, regular expressions, choices and grammars: real clients, real server."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from lorax import Client
from pydantic import BaseModel, Field, SecretStr, TypeAdapter

from tests.support.demo_questions import ADAPTERS, BASE, questions, templated, user

MODELS = [BASE, *ADAPTERS]


class Person(BaseModel, extra="forbid"):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=150)
    kind: Literal["cat", "dog"]


SCHEMA = Person.model_json_schema()
JSON_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
REGEX = r"[A-F0-9]{4}(-[a-z]{1,6})?:\d{1,3}\.\d{2}"
GRAMMAR = 'root ::= "SELECT " ("name" | "age") " FROM users" (" WHERE age > " [0-9] [0-9]?)? ";"'


def answer(client: openai.OpenAI, model: str, *, stream: bool = False, **fields: Any) -> tuple[str, str | None]:
    """(text, finish reason)."""
    asked = {"model": model, "messages": user("hello world"), "max_tokens": 200, "temperature": 1.0, **fields}
    if not stream:
        choice = client.chat.completions.create(**asked).choices[0]
        return choice.message.content or "", choice.finish_reason
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    return "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_an_answer_follows_its_schema_with_every_model(client: openai.OpenAI, model: str, stream: bool) -> None:
    for seed in range(4):
        text, finish_reason = answer(client, model, stream=stream, seed=seed, response_format=JSON_SCHEMA)
        assert finish_reason == "stop"
        assert Person.model_validate_json(text)
        assert list(json.loads(text)) == ["name", "age", "kind"]


def test_the_openai_clients_parser_reads_a_constrained_answer(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="uppercase", messages=user("hello world"), temperature=0, max_tokens=200, response_format=Person
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)


class Login(BaseModel, extra="forbid"):
    key: SecretStr = Field(max_length=8)
    folder: Path = Field(json_schema_extra={"maxLength": 8})


RECORD = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}}
STARTS = {"type": "string", "format": "starts_with", "pattern": "^a{1,4}$"}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (Login.model_json_schema(), Login),
        # As zod writes them.
        ({**RECORD, "maxProperties": 1}, dict[str, None]),
        ({"type": "array", "items": STARTS, "maxItems": 2}, list[Annotated[str, Field(pattern="^a{1,4}$")]]),
    ],
)
def test_annotations_in_a_schema_are_ignored(client: openai.OpenAI, schema: dict[str, Any], kind: Any) -> None:
    held: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text, finish_reason = answer(client, "spell", response_format=held, max_tokens=400, temperature=0)
    assert finish_reason == "stop"
    TypeAdapter(kind).validate_json(text)


@pytest.mark.parametrize(
    ("outputs", "is_right"),
    [
        ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
        ({"choice": ["yes", "no", 'say "maybe"']}, lambda text: text in ("yes", "no", 'say "maybe"')),
        ({"grammar": GRAMMAR}, lambda text: text.startswith("SELECT ") and text.endswith(";")),
        ({"grammar": 'start: "<" /[a-z]{2,5}/ ">"'}, lambda text: re.fullmatch("<[a-z]{2,5}>", text)),
        ({"json": SCHEMA}, Person.model_validate_json),
        (
            {"json": SCHEMA, "disable_any_whitespace": True},
            lambda text: json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")) == text,
        ),
    ],
)
@pytest.mark.parametrize("model", ["spell", BASE])
def test_vllms_structured_outputs_constrain_the_answer(
    client: openai.OpenAI, model: str, outputs: dict[str, Any], is_right: Any
) -> None:
    for seed in range(4):
        text, finish_reason = answer(client, model, seed=seed, extra_body={"structured_outputs": outputs})
        assert finish_reason == "stop"
        assert is_right(text), text


def test_completions_with_several_prompts_and_choices_are_constrained(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model="rot13",
        prompt=[templated("hello"), templated("other")],
        n=3,
        max_tokens=20,
        temperature=1.0,
        logprobs=1,
        extra_body={"structured_outputs": {"choice": ["red", "green", "blue"]}},
    )
    assert {choice.text for choice in completion.choices} <= {"red", "green", "blue"}
    for choice in completion.choices:
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text
        assert len(choice.logprobs.token_logprobs or []) == len(choice.text)


def test_a_truncated_answer_has_finish_reason_length(client: openai.OpenAI) -> None:
    text, finish_reason = answer(client, "spell", max_tokens=5, response_format=JSON_SCHEMA)
    assert (len(text), finish_reason) == (5, "length")
    assert text.startswith("{")


def test_a_json_object_ends_or_is_truncated_without_endless_whitespace(client: openai.OpenAI) -> None:
    """Within the available tokens, unless it is cut off; whitespace alone does not use them up."""
    for model in MODELS:
        text, finish_reason = answer(client, model, temperature=0, response_format={"type": "json_object"})
        assert finish_reason == "length" or isinstance(json.loads(text), dict)
        assert not re.search(r"[ \n]{50}", text)


def test_constrained_and_free_requests_in_one_batch_do_not_affect_each_other(client: openai.OpenAI) -> None:

    def free(question: tuple[str, str, str]) -> bool:
        model, prompt, expected = question
        text, _ = answer(client, model, messages=user(prompt), temperature=0, max_tokens=60)
        return text == expected

    def held(seed: int) -> bool:
        text, _ = answer(client, MODELS[seed % len(MODELS)], seed=seed, response_format=JSON_SCHEMA)
        return Person.model_validate_json(text) is not None

    with ThreadPoolExecutor(16) as pool:
        others = [pool.submit(held, seed) for seed in range(20)]
        assert all(pool.map(free, questions(2)))
        assert all(other.result() for other in others)


NOT_HELD = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "regex parse error"),
        ({"structured_outputs": {"grammar": "start: nosuch"}}, "structured_outputs.grammar", "nosuch"),
        ({"structured_outputs": {"json": NOT_HELD}}, "structured_outputs.json", "uniqueItems"),
        ({"guided_json": NOT_HELD}, "guided_json", "uniqueItems"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NOT_HELD}}},
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "cannot be combined"),
        ({"structured_outputs": {"regex": "a" * 9000}}, "structured_outputs.regex", "9000 characters; the limit is"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"regexp": "x"}}, "structured_outputs.regexp", "Unknown parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
        ({"response_format": JSON_SCHEMA, "ignore_eos": True}, "ignore_eos", "cannot be combined"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_or_invalid_constraints_are_refused(
    http: httpx.Client, fields: dict[str, Any], param: str | None, message: str, stream: bool
) -> None:
    body = {"model": "spell", "messages": user("x"), "stream": stream, **fields}
    response = http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_other_requests_are_answered_while_a_slow_grammar_compiles(client: openai.OpenAI, http: httpx.Client) -> None:
    """This grammar takes 0.7 s to compile on an EPYC core; an answer takes 30 ms."""
    slow = {
        "model": "spell",
        "messages": user("x"),
        "max_tokens": 1,
        "structured_outputs": {"regex": ".*" * 2500 + "0"},
    }
    num_answered = 0
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(http.post, "/v1/chat/completions", json=slow)
        while not held.done():
            text, _ = answer(client, "uppercase", temperature=0)
            assert text == "HELLO WORLD"
            num_answered += 1
    assert held.result().status_code == 200, held.result().text
    assert num_answered > 3, "they waited for it"


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
def test_the_lorax_client_can_request_a_schema(lorax: Client) -> None:
    generated = lorax.generate(
        templated("hello world"),
        adapter_id="reverse",
        max_new_tokens=200,
        response_format={"type": "json_object", "schema": SCHEMA},
    )
    assert Person.model_validate_json(generated.generated_text)

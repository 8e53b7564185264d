"""Tools that the model may choose, beside the format of its answer: the real client on a real server."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import TOOLS_TEMPLATE
from tests.support.demo_questions import user
from tests.support.server_process import WAIT_S, serve

SCHEMA: Any = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
SCHEMA |= {"additionalProperties": False}
ASKED: Any = {
    "model": "arithmetic",
    "messages": user("2+2"),
    "tools": [{"type": "function", "function": {"name": "add"}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}},
    "max_tokens": 40,
    "temperature": 0.0,
}
LESS_THAN = str(ord("<"))
"""The demo's token for it."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("data")
    template = folder / "tools.jinja"
    template.write_text(TOOLS_TEMPLATE)
    with (
        serve(folder, "--chat-template", str(template), "--tool-call-parser", "hermes") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=WAIT_S) as client,
    ):
        yield client


def answer_of(client: openai.OpenAI, **fields: Any) -> str:
    return client.chat.completions.create(**ASKED, **fields).choices[0].message.content or ""


def test_an_answer_that_is_no_call_follows_the_format(client: openai.OpenAI) -> None:
    assert json.loads(answer_of(client)).keys() == {"sum"}


def test_an_answer_may_begin_a_call_instead(client: openai.OpenAI) -> None:
    """The demo does not know tools, so a bias stands for the wish to call one."""
    assert answer_of(client, logit_bias={LESS_THAN: 100}).startswith("<tool_call><<")


def test_without_a_choice_of_tools_an_answer_follows_the_format(client: openai.OpenAI) -> None:
    answer = answer_of(client, logit_bias={LESS_THAN: 100}, tool_choice="none")
    assert json.loads(answer).keys() == {"sum"}

"""Reasoning, shown separately from the answer in the playground; tests decide when the streams' events arrive."""

import json
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import NewConsole
from tests.browser.console import Console
from tests.browser.tenant import Tenant
from tests.browser.test_playground import ask

HELD_STREAMS = """(() => {
  const usual = window.fetch;
  const streams = (window.streams = []);
  window.fetch = (resource, options) => {
    if (!String(resource).endsWith("/v1/chat/completions")) return usual(resource, options);
    let controller;
    const body = new ReadableStream({ start: (started) => (controller = started) });
    options.signal.addEventListener("abort", () => controller.error(options.signal.reason));
    streams.push(controller);
    return Promise.resolve(new Response(body));
  };
})()"""
SEND = """([text, ended]) => {
  const controller = window.streams.at(-1);
  controller.enqueue(new TextEncoder().encode(text));
  if (ended) controller.close();
}"""
LONG = "One thought after another. " * 200
UNBROKEN = "x" * 400


class Playground:
    """A playground with one column, whose streams the test writes."""

    def __init__(self, console: Console) -> None:
        console.page.add_init_script(HELD_STREAMS)
        self.page: Page = console.open("#/playground?columns=")
        self.column: Locator = self.page.get_by_test_id("column-0")
        self.reasoning: Locator = self.page.get_by_test_id("reasoning")
        self.thoughts: Locator = self.reasoning.get_by_role("group", name="Reasoning")
        self.answer: Locator = self.page.get_by_test_id("answer")
        self._console = console
        self._num_asked = 0

    def ask(self) -> None:
        ask(self._console, "2 + 2?")
        self._num_asked += 1
        self.page.wait_for_function("asked => window.streams.length === asked", arg=self._num_asked)
        self.send({"role": "assistant"})

    def send(self, delta: dict[str, Any]) -> None:
        """Sends a delta as the server does, which reports reasoning under both names."""
        if thought := delta.get("reasoning_content"):
            delta = {**delta, "reasoning": thought}
        self._write({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def end(self, reason: str = "stop", *, thought: int = 0, said: int = 0) -> None:
        self._write({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        details = {"completion_tokens_details": {"reasoning_tokens": thought}}
        usage = {"prompt_tokens": 5, "completion_tokens": thought + said, **details}
        self._write({"choices": [], "usage": usage, "metrics": {"tokens_per_second": 41.6}}, ended=True)

    def _write(self, event: dict[str, Any], *, ended: bool = False) -> None:
        text = f"data: {json.dumps(event)}\n\n" + ("data: [DONE]\n\n" if ended else "")
        self.page.evaluate(SEND, [text, ended])

    def figure(self, name: str) -> Locator:
        return self.column.locator(".figure").filter(has_text=name)


@pytest.fixture
def playground(console: Console) -> Playground:
    return Playground(console)


def test_reasoning_is_open_until_the_answer_starts_and_can_be_reopened(playground: Playground) -> None:
    playground.ask()
    expect(playground.column).to_have_attribute("data-state", "waiting")
    playground.send({"reasoning_content": "Two and two "})
    expect(playground.column).to_contain_text("Thinking")
    expect(playground.column.get_by_role("status")).to_have_text("thinking")
    playground.send({"reasoning_content": "are four."})
    expect(playground.thoughts).to_have_text("Two and two are four.")
    expect(playground.answer).to_be_empty()
    playground.send({"content": "4"})
    expect(playground.column.get_by_role("status")).to_have_text("streaming")
    expect(playground.thoughts).to_be_hidden()
    playground.end(thought=1200, said=1)
    expect(playground.answer).to_have_text("4")
    expect(playground.reasoning).to_have_text("Reasoning · 1,200 tokensTwo and two are four.")
    playground.reasoning.locator("summary").press("Enter")
    expect(playground.thoughts).to_be_visible()


def test_reasoning_stays_as_the_user_folded_it_until_the_next_answer(playground: Playground) -> None:
    summary = playground.reasoning.locator("summary")
    playground.ask()
    playground.send({"reasoning_content": "Hm"})
    expect(playground.thoughts).to_be_visible()
    summary.click()
    playground.send({"reasoning_content": ", so"})
    expect(playground.reasoning).to_contain_text("Hm, so")
    expect(playground.thoughts).to_be_hidden()
    summary.click()
    playground.send({"content": "4"})
    expect(playground.answer).to_have_text("4")
    expect(playground.thoughts).to_be_visible()
    playground.end()
    playground.ask()
    expect(playground.reasoning).to_have_count(0)
    playground.send({"reasoning_content": "Again"})
    expect(playground.thoughts).to_be_visible()
    playground.send({"content": "4"})
    expect(playground.thoughts).to_be_hidden()


def test_reasoning_counts_for_ttft_and_as_output(playground: Playground) -> None:
    playground.ask()
    expect(playground.figure("TTFT")).to_contain_text("–")
    playground.send({"reasoning_content": "Hm"})
    expect(playground.figure("TTFT")).not_to_contain_text("–")
    first = playground.figure("TTFT").inner_text()
    playground.send({"content": "4"})
    playground.end(thought=30, said=2)
    expect(playground.figure("Output")).to_contain_text("32")
    expect(playground.figure("Tokens/s")).to_contain_text("42")
    assert playground.figure("TTFT").inner_text() == first


def test_a_stopped_answer_keeps_its_reasoning(playground: Playground) -> None:
    playground.ask()
    playground.send({"reasoning_content": "Two and"})
    expect(playground.thoughts).to_have_text("Two and")
    playground.page.get_by_role("button", name="Stop").click()
    expect(playground.column).to_have_attribute("data-state", "stopped")
    expect(playground.thoughts).to_have_text("Two and")
    expect(playground.thoughts).to_be_visible()
    expect(playground.column).not_to_contain_text("Thinking")


@pytest.mark.parametrize(
    ("reason", "said"),
    [("stop", "The model stopped before it answered."), ("length", "Reasoning used up all allowed tokens.")],
)
def test_an_end_before_the_answer_is_reported_with_its_reason(playground: Playground, reason: str, said: str) -> None:
    playground.ask()
    playground.send({"reasoning_content": "Two and"})
    playground.end(reason, thought=2)
    expect(playground.answer).to_have_text(said)
    expect(playground.column.get_by_role("status")).to_have_text(f"ended: {reason}")
    expect(playground.thoughts).to_be_visible()
    expect(playground.page.get_by_role("button", name="Copy the answer")).to_have_count(0)


def test_copying_the_answer_leaves_out_the_reasoning(playground: Playground) -> None:
    playground.ask()
    playground.send({"reasoning_content": "Two and two"})
    playground.send({"content": "It is "})
    playground.send({"content": "4."})
    playground.end()
    playground.page.get_by_role("button", name="Copy the answer").click()
    expect(playground.page.get_by_role("button", name="Copied")).to_be_visible()
    assert playground.page.evaluate("navigator.clipboard.readText()") == "It is 4."


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_long_reasoning_shows_its_end_as_it_arrives_and_keeps_the_answer_visible(
    new_console: NewConsole, tenant: Tenant, width: int, theme: str
) -> None:
    console = new_console(width=width, theme=theme)
    console.start_session(tenant.operator_key)
    playground = Playground(console)
    playground.ask()
    for text in (LONG, UNBROKEN, "And so it is."):
        playground.send({"reasoning_content": text})
    expect(playground.thoughts).to_contain_text("And so it is.")
    assert playground.thoughts.evaluate("e => e.scrollHeight > e.clientHeight && e.scrollTop === 0")
    bottom = "e => e.lastElementChild.getBoundingClientRect().bottom - e.getBoundingClientRect().bottom"
    assert abs(playground.thoughts.evaluate(bottom)) < 1
    playground.send({"content": "4"})
    playground.end()
    playground.reasoning.locator("summary").click()
    expect(playground.thoughts).to_be_visible()
    inside = "e => e.getBoundingClientRect().bottom <= e.parentElement.getBoundingClientRect().bottom"
    assert playground.answer.evaluate(inside)

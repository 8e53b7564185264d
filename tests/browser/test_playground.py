"""The playground: the same prompt to several models at once."""

import json
import shlex
import subprocess

from playwright.sync_api import Route, expect

from tests.browser.conftest import NewConsole
from tests.browser.console import START_MS, Console
from tests.browser.tenant import Tenant
from tests.support.demo_questions import ADAPTER_DIR
from tests.support.server_process import wait_until

TWO_COLUMNS = "#/playground?columns=,uppercase"
LINE_STARTS = """
(answer) => {
  const range = document.createRange();
  const text = answer.firstChild;
  return [0, text.data.indexOf("Hello")].map((index) => {
    range.setStart(text, index);
    range.setEnd(text, index + 1);
    return range.getBoundingClientRect().left;
  });
}
"""


def ask(console: Console, prompt: str) -> None:
    console.page.get_by_test_id("prompt").fill(prompt)
    console.page.get_by_role("button", name="Send").click()


def see_done(console: Console, num_columns: int) -> None:
    for index in range(num_columns):
        column = console.page.get_by_test_id(f"column-{index}")
        expect(column).to_have_attribute("data-state", "done", timeout=START_MS)


def test_base_and_adapter_answer_side_by_side_with_their_figures(console: Console):
    page = console.open(TWO_COLUMNS)
    ask(console, "hello world")
    see_done(console, 2)
    answers = page.get_by_test_id("answer")
    expect(answers.nth(0)).to_contain_text("You said: hello world")
    expect(answers.nth(1)).to_have_text("HELLO WORLD")
    adapter = page.get_by_test_id("column-1")
    expect(adapter).to_contain_text("ended: stop")
    expect(adapter).to_contain_text("v1")
    figures = adapter.locator(".figure")
    expect(figures.filter(has_text="TTFT")).to_contain_text("s")
    expect(figures.filter(has_text="Output")).not_to_contain_text("–")


def test_tokens_per_second_is_the_servers_metric_even_if_all_tokens_arrive_together(console: Console):
    page = console.open(TWO_COLUMNS)

    def answer(route: Route) -> None:
        assert route.request.post_data_json["include_metrics"] is True
        text = {"choices": [{"delta": {"content": "all at once"}, "finish_reason": "stop"}]}
        usage = {"prompt_tokens": 1, "completion_tokens": 30}
        last = {"choices": [], "usage": usage, "metrics": {"tokens_per_second": 41.6}}
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in (text, last)) + "data: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    ask(console, "hello")
    see_done(console, 2)
    expect(page.get_by_test_id("column-0").locator(".figure").filter(has_text="Tokens/s")).to_contain_text("42")


def test_differences_from_the_first_column_are_marked_by_word(console: Console):
    page = console.open(TWO_COLUMNS)
    ask(console, "hello world")
    see_done(console, 2)
    page.get_by_label("Mark what differs").check()
    expect(page.get_by_test_id("column-1").locator("mark")).to_have_text(["HELLO", "WORLD"])
    expect(page.get_by_test_id("column-0").locator("mark")).to_have_count(0)


def test_an_answer_too_long_to_compare_by_word_is_shown_whole(console: Console):
    page = console.open(TWO_COLUMNS)
    ends = iter(("the end", "another end"))
    begin = "word " * 1500

    def answer(route: Route) -> None:
        chunk = {"choices": [{"delta": {"content": begin + next(ends)}, "finish_reason": "stop"}]}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    ask(console, "hello")
    see_done(console, 2)
    column = page.get_by_test_id("column-1")
    whole = column.get_by_test_id("answer").inner_text()
    page.get_by_label("Mark what differs").check()
    expect(column.locator("mark")).to_have_count(1)
    expect(column.locator("mark")).to_contain_text("end")
    assert column.get_by_test_id("answer").inner_text() == whole


def test_a_right_to_left_answer_starts_on_the_right(console: Console):
    page = console.open("#/playground")

    def answer(route: Route) -> None:
        chunk = {"choices": [{"delta": {"content": "مرحبا!\nHello!"}, "finish_reason": "stop"}]}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    ask(console, "hello")
    see_done(console, 1)
    arabic, english = page.get_by_test_id("answer").evaluate(LINE_STARTS)
    box = page.get_by_test_id("answer").bounding_box()
    assert box is not None
    assert arabic > box["x"] + box["width"] / 2 > english


def test_equal_answers_have_nothing_marked(console: Console):
    page = console.open("#/playground?columns=uppercase,uppercase")
    ask(console, "same seed")
    see_done(console, 2)
    page.get_by_label("Mark what differs").check()
    expect(page.locator("mark")).to_have_count(0)


def test_an_empty_answer_is_reported_as_empty_even_beside_a_non_empty_one(console: Console):
    page = console.open(TWO_COLUMNS)

    def answer(route: Route) -> None:
        content = "" if route.request.post_data_json["model"] == "uppercase" else "hello"
        chunk = {"choices": [{"delta": {"content": content}, "finish_reason": "stop"}]}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    page.get_by_label("Mark what differs").check()
    ask(console, "hello")
    see_done(console, 2)
    expect(page.get_by_test_id("answer")).to_have_text(["hello", "The answer is empty."])


def test_columns_are_kept_in_the_address_and_limited_to_four(console: Console):
    page = console.open(TWO_COLUMNS)
    add = page.get_by_role("button", name="Add a column")
    add.click()
    add.click()
    expect(page.locator(".column")).to_have_count(4)
    expect(add).to_have_count(0)
    page.get_by_label("Model of column 3").fill("reverse")
    page.get_by_label("Model of column 3").press("Enter")
    page.reload()
    expect(page.get_by_label("Model of column 3")).to_have_value("reverse")
    page.get_by_role("button", name="Remove column 1").click()
    expect(page.get_by_label("Model of column 2")).to_have_value("reverse")


def test_the_seed_and_mode_are_kept_in_the_address_but_the_prompt_is_not(console: Console):
    page = console.open(TWO_COLUMNS)
    page.get_by_role("button", name="completion").click()
    seed = page.get_by_label("Seed")
    seed.fill("7")
    seed.blur()
    seed.fill("")
    seed.blur()
    expect(seed).to_have_value("7")
    page.get_by_test_id("prompt").fill("a secret")
    page.reload()
    expect(page.get_by_label("Seed")).to_have_value("7")
    expect(page.get_by_role("button", name="completion")).to_have_attribute("aria-pressed", "true")
    assert "secret" not in page.url


def test_typed_text_is_restored_when_returning_from_another_view(console: Console):
    page = console.open(f"{TWO_COLUMNS}&format=schema")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_test_id("prompt").fill("a long question")
    page.get_by_label("JSON schema").fill("{}")
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_role("heading", name="Live", exact=True)).to_be_visible()
    page.go_back()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(page.get_by_test_id("prompt")).to_have_value("a long question")
    expect(page.get_by_label("JSON schema")).to_have_value("{}")


def test_changing_the_model_of_a_column_clears_its_answer(console: Console):
    page = console.open(TWO_COLUMNS)
    ask(console, "hello")
    see_done(console, 2)
    page.get_by_label("Model of column 2").fill("reverse")
    page.get_by_label("Model of column 2").press("Enter")
    column = page.get_by_test_id("column-1")
    expect(column).to_have_attribute("data-state", "idle")
    expect(column).not_to_contain_text("HELLO")
    expect(page.get_by_test_id("column-0")).to_have_attribute("data-state", "done")


STOP_AT_THE_FIRST_WORD = """() => new MutationObserver((_, observer) => {
    const stop = [...document.querySelectorAll("button")].find((button) => button.textContent.trim() === "Stop");
    if (!stop || !document.querySelector("[data-testid=answer]")?.textContent) return;
    observer.disconnect();
    stop.click();
}).observe(document.body, { subtree: true, childList: true, characterData: true })"""


def test_stopping_keeps_the_partial_answer_and_aborts_the_request_on_the_server(console: Console, tenant: Tenant):
    """A script in the page clicks the button: the demo model writes the maximum within half a second."""

    def go_on_and_on(route: Route) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True, "n": 8}))

    page = console.open("#/playground?columns=")
    page.route("**/v1/chat/completions", go_on_and_on)
    page.get_by_label("Max tokens").fill("900")
    page.evaluate(STOP_AT_THE_FIRST_WORD)
    ask(console, "hello")
    column = page.get_by_test_id("column-0")
    expect(column).to_have_attribute("data-state", "stopped", timeout=START_MS)
    expect(page.get_by_test_id("answer")).not_to_be_empty()

    def aborted() -> bool:
        return [row["state"] for row in tenant.http.get("/v1/requests").json()["data"]] == ["abort"]

    wait_until(aborted, "the request ended on the server")
    expect(column).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_double_click_on_send_sends_and_does_not_stop(console: Console):
    page = console.open("#/playground")
    page.get_by_test_id("prompt").fill("hello world")
    page.get_by_role("button", name="Send").dblclick()
    see_done(console, 1)


def test_an_unknown_model_fails_only_its_own_column(console: Console):
    console.watch.expect_status(404)
    page = console.open("#/playground?columns=nothing-here,uppercase")
    ask(console, "hello")
    expect(page.get_by_test_id("column-0").get_by_role("alert")).to_contain_text("nothing-here")
    expect(page.get_by_test_id("answer").nth(1)).to_have_text("HELLO", timeout=START_MS)


def test_a_broken_stream_shows_an_error_below_the_partial_answer(console: Console):
    def cut(route: Route) -> None:
        chunk = {"choices": [{"index": 0, "delta": {"content": "half an"}, "finish_reason": None}]}
        route.fulfill(body=f"data: {json.dumps(chunk)}\n\n", content_type="text/event-stream")

    page = console.open("#/playground?columns=uppercase")
    page.route("**/v1/chat/completions", cut)
    ask(console, "hello")
    expect(page.get_by_test_id("column-0").get_by_role("alert")).to_contain_text("ended before the answer was complete")
    expect(page.get_by_test_id("answer")).to_contain_text("half an")


def test_an_unreachable_server_is_reported_with_advice_to_try_again(console: Console):
    console.watch.expect_no_answer()
    page = console.open("#/playground?columns=uppercase")
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    ask(console, "hello")
    expect(page.get_by_test_id("column-0").get_by_role("alert")).to_contain_text("try again once it is back")


def test_copy_as_curl_gives_a_command_that_works_in_a_shell(console: Console, tenant: Tenant):
    page = console.open("#/playground?columns=uppercase")
    prompt = 'it\'s "quoted" $HOME'
    page.get_by_test_id("prompt").fill(prompt)
    page.get_by_role("button", name="Copy as curl").click()
    command = page.evaluate("navigator.clipboard.readText()")
    assert tenant.operator_key not in command
    words = shlex.split(command.replace("\\\n", ""))
    assert json.loads(words[words.index("-d") + 1])["messages"][0]["content"] == prompt
    ran = subprocess.run(
        ["sh", "-c", command],
        env={"LORASERVE_API_KEY": tenant.operator_key, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "data: [DONE]" in ran.stdout, ran.stdout + ran.stderr


SCHEMA = {
    "type": "object",
    "properties": {"topic": {"enum": ["billing", "it's"]}, "urgent": {"type": "boolean"}},
    "required": ["topic", "urgent"],
    "additionalProperties": False,
}


def test_every_column_and_its_curl_command_use_the_json_schema(console: Console):
    page = console.open(TWO_COLUMNS)
    page.get_by_role("combobox", name="Answer format").select_option("schema")
    schema = page.get_by_role("textbox", name="JSON schema")
    schema.fill(json.dumps(SCHEMA))
    ask(console, "my invoice is wrong")
    see_done(console, 2)
    for answer in page.get_by_test_id("answer").all_inner_texts():
        told = json.loads(answer)
        assert told.keys() == {"topic", "urgent"}
        assert told["topic"] in SCHEMA["properties"]["topic"]["enum"]
    page.get_by_role("button", name="Copy as curl").nth(1).click()
    words = shlex.split(page.evaluate("navigator.clipboard.readText()").replace("\\\n", ""))
    held_to = json.loads(words[words.index("-d") + 1])["response_format"]
    assert held_to == {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    # The chosen format is in the address, the typed schema is not.
    page.reload()
    expect(schema).to_have_value("")
    assert "billing" not in page.url


def test_an_invalid_schema_is_not_sent_and_the_server_refuses_an_unsupported_one(console: Console):
    console.watch.expect_status(400)
    page = console.open("#/playground?columns=uppercase&format=schema")
    page.get_by_test_id("prompt").fill("hello")
    send = page.get_by_role("button", name="Send")
    schema = page.get_by_role("textbox", name="JSON schema")
    for text, problem in (('{"type": "obj', "Not valid JSON"), ("[1]", "The schema must be a JSON object.")):
        schema.fill(text)
        expect(page.get_by_role("alert")).to_contain_text(problem)
        expect(send).to_be_disabled()
        expect(page.get_by_role("button", name="Copy as curl")).to_have_count(0)
    schema.fill('{"type": "string", "not": {"const": "a"}}')
    send.click()
    expect(page.get_by_test_id("column-0").get_by_role("alert")).to_contain_text("not")


def test_the_json_format_answers_with_a_json_object(console: Console):
    page = console.open("#/playground?columns=json&format=json")
    ask(console, "color red")
    see_done(console, 1)
    assert isinstance(json.loads(page.get_by_test_id("answer").inner_text()), dict)


def test_another_tenants_adapter_is_tried_on_behalf_of_that_tenant(
    new_console: NewConsole, tenant: Tenant, admin_secret: str
):
    tenant.add("theirs", ADAPTER_DIR / "uppercase")
    root = new_console()
    root.start_session(admin_secret)
    page = root.open(f"#/adapters/theirs?tenant={tenant.name}")
    page.get_by_role("link", name="Try it").click()
    notice = page.get_by_test_id("playground-tenant")
    expect(notice).to_contain_text(f"Model names refer to adapters of {tenant.name}")
    ask(root, "hello world")
    see_done(root, 2)
    expect(page.get_by_test_id("answer").nth(1)).to_have_text("HELLO WORLD")
    expect(page.locator("#models-1 option[value=theirs]")).to_have_count(1)
    page.get_by_role("button", name="Copy as curl").nth(1).click()
    assert f"-H 'X-Tenant: {tenant.name}'" in page.evaluate("navigator.clipboard.readText()")
    notice.get_by_role("link", name="Use those of default instead").click()
    expect(notice).to_have_count(0)

"""Classifiers in the console: their labels, and trying them."""

import re
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.conftest import NewConsole
from tests.browser.console import START_MS, Console
from tests.browser.tenant import Tenant
from tests.support.adapter_variants import classifier

LABELS = ["billing", "login", "<img src=x onerror=alert(1)>"]


def test_an_uploaded_classifier_is_tried_in_classify_mode(console: Console, tenant: Tenant, tmp_path: Path):
    console.upload("intent", classifier(tmp_path / "intent", "reverse", LABELS))
    end = console.see_upload_end("ready")
    console.page.get_by_text("checks passed").click()
    expect(console.page.get_by_text("a classifier of 3 labels: billing, login")).to_be_visible()
    end.get_by_role("link", name="Try it").click()
    page = console.page
    expect(page).to_have_url(re.compile(r"#/playground\?columns=intent(@|%40)v1&mode=classify$"))
    page.get_by_test_id("prompt").fill("My invoice is wrong")
    page.get_by_role("button", name="Send").click()
    column = page.get_by_test_id("column-0")
    expect(column).to_have_attribute("data-state", "done", timeout=START_MS)
    labels = column.get_by_test_id("labels").get_by_role("listitem")
    expect(labels).to_have_count(3)
    expect(column).to_contain_text("v1")
    (item,) = tenant.http.post("/v1/classify", json={"model": "intent", "input": "My invoice is wrong"}).json()["data"]
    expect(labels.first).to_contain_text(item["label"])
    expect(labels.first).to_contain_text(f"{100 * max(item['probs']):.0f}")
    names = {label.split("\n")[0] for label in labels.all_inner_texts()}
    assert names == {*LABELS}


def test_a_classifiers_page_shows_its_labels_and_example_requests(console: Console, tenant: Tenant, tmp_path: Path):
    tenant.add("intent", classifier(tmp_path / "intent", "reverse", LABELS))
    page = console.open("#/adapters/intent")
    expect(page.get_by_test_id("labels").locator(".chip")).to_have_text(LABELS)
    page.get_by_role("link", name="Use it").click()
    expect(page.locator(".snippet").first).to_contain_text("/v1/classify")
    expect(page.locator(".snippet").nth(1)).to_contain_text('client.post(\n    "/classify"')
    page.get_by_role("link", name="Try it").click()
    expect(page).to_have_url(re.compile(r"#/playground\?columns=intent&mode=classify$"))


def test_a_column_fails_if_its_model_does_not_support_the_chosen_mode(
    new_console: NewConsole, tenant: Tenant, tmp_path: Path
):
    tenant.add("intent", classifier(tmp_path / "intent", "reverse", LABELS))
    console = new_console(width=390, theme="dark")
    console.start_session(tenant.operator_key)
    console.watch.expect_status(400)
    page = console.open("#/playground?columns=,intent")
    page.get_by_test_id("prompt").fill("hello")
    for mode, index, said in (("chat", 1, "cannot generate text"), ("classify", 0, "which is not a classifier")):
        page.get_by_role("button", name=mode, exact=True).click()
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_test_id(f"column-{index}")).to_have_attribute("data-state", "failed", timeout=START_MS)
        expect(page.get_by_test_id(f"column-{index}").get_by_role("alert")).to_contain_text(said)
        expect(page.get_by_test_id(f"column-{1 - index}")).to_have_attribute("data-state", "done", timeout=START_MS)


def test_a_reranker_is_tried_with_documents(console: Console, tenant: Tenant, tmp_path: Path):
    template = "<|user|>query: {query}\ndocument: {document}<|end|>"
    tenant.add("ranker", classifier(tmp_path / "ranker", "reverse", ["relevant"], template))
    page = console.open("#/adapters/ranker")
    expect(page.get_by_text("document: {document}")).to_be_visible()
    page.get_by_role("link", name="Use it").click()
    expect(page.locator(".snippet").first).to_contain_text("/v1/rerank")
    page.get_by_role("link", name="Try it").click()
    expect(page).to_have_url(re.compile(r"#/playground\?columns=ranker&mode=rerank$"))
    page.get_by_test_id("prompt").fill("where is my money?")
    send = page.get_by_role("button", name="Send")
    expect(send).to_be_disabled()
    documents = ["the shop is closed", "we pay back", "HELLO"]
    page.get_by_test_id("documents").fill("\n\n".join(documents))
    send.click()
    column = page.get_by_test_id("column-0")
    expect(column).to_have_attribute("data-state", "done", timeout=START_MS)
    body = {"model": "ranker", "query": "where is my money?", "documents": documents}
    results = tenant.http.post("/v1/rerank", json=body).json()["results"]
    ranked = column.get_by_test_id("labels").get_by_role("listitem")
    expect(ranked).to_contain_text([result["document"]["text"] for result in results])
    expect(ranked.first).to_contain_text(f"{100 * results[0]['relevance_score']:.0f}")

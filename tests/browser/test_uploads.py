"""Uploads: from a folder on a person's disk to a served adapter, or to the reason for a rejection."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, Request, Route, expect

from tests.browser.conftest import NewConsole
from tests.browser.console import START_MS, Console
from tests.browser.tenant import FILES, Tenant
from tests.support.adapter_variants import twin, variant
from tests.support.demo_questions import ADAPTER_DIR
from tests.support.server_process import ServerProcess


@pytest.fixture
def shared(server: ServerProcess, admin: httpx.Client) -> Iterator[Tenant]:
    """The tenant whose adapters all tenants see; adapters that a test adds are deleted after it."""
    with ExitStack() as stack:
        shared = Tenant.create("shared", server.url, admin, stack)
        known = names(shared)
        yield shared
        for name in names(shared) - known:
            assert shared.http.delete(f"/v1/adapters/{name}", params={"drain_s": 0}).is_success


@pytest.fixture
def root(shared: Tenant, new_console: NewConsole, tenant: Tenant, admin_secret: str) -> Console:
    """Admin of all tenants, acting for `tenant`; closed before `shared` deletes adapters that its page may show."""
    console = new_console()
    console.start_session(admin_secret)
    console.page.add_init_script(
        f"if (location.protocol !== 'about:') sessionStorage.setItem('tenant', '{tenant.name}')"
    )
    return console


def names(tenant: Tenant) -> set[str]:
    return {adapter["name"] for adapter in tenant.http.get("/v1/adapters").json()["data"]}


def choose_as_a_person_does(page: Page, folder: Path) -> None:
    """Chromium notifies the page only if the selection changed; `set_input_files` always notifies it."""
    devtools = page.context.new_cdp_session(page)
    field = devtools.send("Runtime.evaluate", {"expression": "document.querySelector('[data-testid=file-input]')"})
    files = [str(folder / file) for file in FILES]
    devtools.send("DOM.setFileInputFiles", {"files": files, "objectId": field["result"]["objectId"]})
    devtools.detach()


def left_open(tenant: Tenant, name: str, folder: Path, files: tuple[str, ...], *, activate: bool = True) -> str:
    """The id of an upload session in the state in which a page closed after sending these files leaves it."""
    sizes = [{"name": file, "size_bytes": (folder / file).stat().st_size} for file in FILES]
    body = {"files": sizes, "activate": activate}
    opened = tenant.http.post(f"/v1/adapters/{name}/uploads", json=body).json()
    for file in files:
        content = (folder / file).read_bytes()
        headers = {
            "content-type": "application/octet-stream",
            "content-range": f"bytes 0-{len(content) - 1}/{len(content)}",
        }
        assert tenant.http.put(f"/v1/uploads/{opened['id']}/files/{file}", content=content, headers=headers).is_success
    return opened["id"]


def test_an_uploaded_folder_becomes_a_live_adapter_that_answers(console: Console, tmp_path: Path):
    console.upload("shouting", twin(tmp_path / "shouting", "uppercase"))
    end = console.see_upload_end("ready")
    expect(end).to_contain_text("Version 1 is live")
    expect(console.page.get_by_test_id("stepper")).to_have_attribute("data-state", "ready")
    end.get_by_role("link", name="Try it").click()
    console.page.get_by_test_id("prompt").fill("hello world")
    console.page.get_by_role("button", name="Send").click()
    answers = console.page.get_by_test_id("answer")
    expect(answers.nth(1)).to_contain_text("HELLO WORLD", timeout=START_MS)
    expect(answers.nth(0)).not_to_contain_text("HELLO WORLD")


def test_dropped_files_are_uploaded(console: Console):
    page = console.open("#/upload?name=dropped")
    files = {file: list((ADAPTER_DIR / "spell" / file).read_bytes()) for file in FILES}
    dropped = page.evaluate_handle(
        """(files) => {
            const transfer = new DataTransfer();
            for (const [name, bytes] of Object.entries(files)) {
                transfer.items.add(new File([new Uint8Array(bytes)], name));
            }
            return transfer;
        }""",
        files,
    )
    page.get_by_test_id("drop-zone").dispatch_event("drop", {"dataTransfer": dropped})
    expect(page.get_by_test_id("chosen-files")).to_contain_text(FILES[1])
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(console.see_upload_end("ready")).to_contain_text("Version 1 is live")


def test_the_name_comes_from_the_folder_and_unrelated_files_are_ignored(console: Console, tmp_path: Path):
    folder = twin(tmp_path / "My Adapter (final)", "spell")
    (folder / "README.md").write_text("made with care")
    page = console.open("#/upload")
    page.get_by_test_id("folder-input").set_input_files(folder)
    expect(page.locator("input[name=adapter-name]")).to_have_value("My-Adapter-final-")
    expect(page.get_by_test_id("chosen-files")).to_contain_text("Ignored")
    expect(page.get_by_test_id("chosen-files")).to_contain_text("README.md")


def test_an_upload_without_activation_becomes_a_version_that_is_not_live(
    console: Console, tenant: Tenant, tmp_path: Path
):
    tenant.add("waiting", ADAPTER_DIR / "uppercase")
    folder = twin(tmp_path / "twin", "uppercase")
    page = console.open("#/upload?name=waiting")
    page.get_by_test_id("file-input").set_input_files([folder / file for file in FILES])
    page.get_by_role("checkbox").uncheck()
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(console.see_upload_end("ready")).to_contain_text("Version 2 is ready")
    assert tenant.http.get("/v1/adapters/waiting").json()["live"]["n"] == 1


def test_uploading_the_same_content_again_creates_no_new_version(console: Console, tenant: Tenant):
    tenant.add("twice", ADAPTER_DIR / "rot13")
    console.upload("twice", ADAPTER_DIR / "rot13")
    expect(console.see_upload_end("ready")).to_contain_text("This content already exists as version 1")


def test_a_rejected_adapter_shows_its_failures_first_with_remedies(console: Console, tmp_path: Path):
    console.watch.expect_status(400)
    folder = variant(tmp_path / "qalora", "rot13", lambda config: config.update(use_qalora=True))
    console.upload("qalora", folder)
    expect(console.see_upload_end("rejected")).to_contain_text("Nothing was changed")
    groups = console.page.get_by_test_id("report").locator("details")
    expect(groups.first).to_have_class(re.compile("is-fail"))
    failed = console.page.get_by_test_id("check-fail").filter(has_text="use_qalora")
    expect(failed).to_contain_text("adapter_config.json")
    expect(failed).to_contain_text("false")
    # Does not repeat the file and the values, which are shown beside it.
    expect(failed.locator(".report-remedy")).to_have_text(
        "QA-LoRA is not supported. Train or convert the adapter without this option."
    )
    console.page.get_by_role("button", name="Upload another").click()
    expect(console.page.get_by_text("rejected").first).to_be_visible()


def test_damaged_weights_are_rejected_naming_the_tensor(console: Console, tmp_path: Path):
    console.watch.expect_status(400)

    def spoil(tensors: dict) -> None:
        key = next(name for name in tensors if name.endswith("lora_A.weight"))
        tensors[key] = tensors[key] * float("nan")

    console.upload("spoilt", variant(tmp_path / "spoilt", "rot13", change_tensors=spoil))
    console.see_upload_end("rejected")
    expect(console.page.get_by_test_id("check-fail").first).to_contain_text("lora_A")


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["adapter_config.json"], "adapter_model.safetensors is missing"),
        (["adapter_config.json", "adapter_model.bin"], "can run code"),
        (["notes.txt"], "adapter_config.json is missing"),
    ],
)
def test_files_that_cannot_be_an_adapter_are_refused_before_anything_is_sent(
    console: Console, tmp_path: Path, names: list[str], problem: str
):
    sent: list[str] = []
    page = console.open("#/upload?name=wrong")
    page.on("request", lambda request: sent.append(request.method))
    for name in names:
        (tmp_path / name).write_text(json.dumps({"r": 8}))
    page.get_by_test_id("file-input").set_input_files([tmp_path / name for name in names])
    expect(page.get_by_role("alert").filter(has_text=problem)).to_be_visible()
    expect(page.get_by_role("button", name="Upload", exact=True)).to_be_disabled()
    assert "POST" not in sent


def test_a_folder_with_checkpoints_shows_one_error_for_each_duplicate_file(console: Console, tmp_path: Path):
    twin(tmp_path / "run", "json")
    for step in range(3):
        twin(tmp_path / "run" / f"checkpoint-{step}", "json")
    page = console.open("#/upload")
    page.get_by_test_id("folder-input").set_input_files(tmp_path / "run")
    for file in FILES:
        expect(page.get_by_role("alert").filter(has_text=f"{file} was found twice")).to_have_count(1)


def test_an_unfinished_upload_resumes_where_it_stopped(console: Console, tenant: Tenant, tmp_path: Path):
    folder = twin(tmp_path / "resumed", "json")
    left_open(tenant, "resumed", folder, FILES[:1])
    page = console.open("#/upload?name=resumed")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(f"{request.method} {request.url.rsplit('/', 1)[1]}"))
    page.get_by_test_id("folder-input").set_input_files(folder)
    page.get_by_role("button", name="Resume upload").click()
    expect(console.see_upload_end("ready")).to_contain_text("Version 1 is live")
    assert f"PUT {FILES[1]}" in sent
    assert f"PUT {FILES[0]}" not in sent
    assert not any(request.startswith("POST uploads") for request in sent)


def test_a_resumed_upload_keeps_its_activation_choice(console: Console, tenant: Tenant, tmp_path: Path):
    tenant.add("candidate", ADAPTER_DIR / "uppercase")
    folder = twin(tmp_path / "candidate", "json")
    left_open(tenant, "candidate", folder, FILES[:1], activate=False)
    page = console.open("#/upload?name=candidate")
    page.get_by_test_id("folder-input").set_input_files(folder)
    expect(page.get_by_role("button", name="Resume upload")).to_be_visible()
    expect(page.get_by_role("checkbox")).not_to_be_checked()
    expect(page.get_by_role("checkbox")).to_be_disabled()
    page.get_by_role("button", name="Resume upload").click()
    expect(console.see_upload_end("ready")).to_contain_text("Version 2 is ready")
    assert tenant.http.get("/v1/adapters/candidate").json()["live"]["n"] == 1


def test_an_upload_that_is_no_longer_listed_can_be_resumed_from_its_address(
    console: Console, tenant: Tenant, tmp_path: Path
):
    folder = twin(tmp_path / "older", "json")
    upload_id = left_open(tenant, "older", folder, FILES[:1])
    # As if twenty newer uploads filled the list.
    console.page.route("**/v1/uploads?limit=*", lambda route: route.fulfill(json={"data": [], "next_cursor": None}))
    page = console.open(f"#/upload/{upload_id}")
    page.get_by_role("link", name="Continue").click()
    page.get_by_test_id("folder-input").set_input_files(folder)
    page.get_by_role("button", name="Resume upload").click()
    expect(console.see_upload_end("ready")).to_contain_text("Version 1 is live")
    assert tenant.http.get(f"/v1/uploads/{upload_id}").json()["state"] == "ready"


def test_files_rewritten_since_do_not_resume_the_old_upload(console: Console, tenant: Tenant, tmp_path: Path):
    folder = twin(tmp_path / "trained", "json")
    upload_id = left_open(tenant, "trained", folder, FILES[:1])
    # Trained again: names and sizes are the same.
    weights = folder / FILES[1]
    weights.write_bytes(weights.read_bytes())
    page = console.open("#/upload?name=trained")
    expect(page.get_by_test_id("past-upload")).to_have_count(1)
    page.get_by_test_id("folder-input").set_input_files(folder)
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(console.see_upload_end("ready")).to_contain_text("Version 1 is live")
    assert tenant.http.get(f"/v1/uploads/{upload_id}").json()["state"] == "open"


def test_corrected_files_can_be_chosen_again(console: Console, tmp_path: Path):
    folder = twin(tmp_path / "repaired", "json")
    config = folder / FILES[0]
    content = config.read_bytes()
    config.write_bytes(b"")
    page = console.open("#/upload?name=repaired")
    choose_as_a_person_does(page, folder)
    expect(page.get_by_role("alert")).to_contain_text("adapter_config.json is empty")
    config.write_bytes(content)
    choose_as_a_person_does(page, folder)
    expect(page.get_by_role("alert")).to_have_count(0)
    page.get_by_role("button", name="Upload", exact=True).click()
    console.see_upload_end("ready")


def test_a_file_that_changed_after_it_was_chosen_is_named(console: Console, tmp_path: Path):
    console.watch.expect_no_answer()
    folder = twin(tmp_path / "rewritten", "json")
    page = console.open("#/upload")
    page.get_by_test_id("folder-input").set_input_files(folder)
    expect(page.get_by_test_id("chosen-files")).to_be_visible()
    with (folder / FILES[1]).open("ab") as weights:
        weights.write(b"more")
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("adapter_model.safetensors")
    expect(page.get_by_test_id("upload-waits")).to_have_count(0)


def test_an_upload_with_all_files_sent_can_be_finished_from_its_address(
    console: Console, tenant: Tenant, tmp_path: Path
):
    upload_id = left_open(tenant, "nearly", twin(tmp_path / "nearly", "json"), FILES)
    page = console.open("#/upload")
    page.get_by_test_id("past-upload").get_by_role("link", name="nearly").click()
    expect(page).to_have_url(f"{console.url}/ui/#/upload/{upload_id}")
    page.get_by_role("button", name="Check and load").click()
    expect(console.see_upload_end("ready")).to_contain_text("Version 1 is live")


def test_an_unfinished_upload_can_be_canceled_from_its_address(console: Console, tenant: Tenant, tmp_path: Path):
    upload_id = left_open(tenant, "left", twin(tmp_path / "left", "json"), FILES[:1])
    page = console.open(f"#/upload/{upload_id}")
    expect(page.get_by_text("only the missing part is sent")).to_be_visible()
    page.get_by_role("button", name="Cancel upload").click()
    console.dialog("Cancel the upload of left?").get_by_role("button", name="Cancel upload").click()
    expect(console.see_upload_end("aborted")).to_contain_text("Upload canceled")
    assert tenant.http.get(f"/v1/uploads/{upload_id}").json()["state"] == "aborted"


def test_an_upload_continues_while_another_view_is_open(console: Console, tmp_path: Path):
    held: list[Route] = []
    page = console.page
    page.route("**/files/adapter_model.safetensors", lambda route: held.append(route))
    with page.expect_request("**/files/adapter_model.safetensors"):
        console.upload("meanwhile", twin(tmp_path / "meanwhile", "json"))
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_role("heading", name="Live", exact=True)).to_be_visible()
    page.get_by_role("link", name="Upload").click()
    expect(page.get_by_role("progressbar", name="adapter_model.safetensors")).to_be_visible()
    held[0].continue_()
    console.see_upload_end("ready")
    page.get_by_role("button", name="Upload another").click()
    expect(page.get_by_test_id("drop-zone")).to_be_visible()


def test_leaving_the_page_during_an_upload_asks_first_even_from_another_view(console: Console, tmp_path: Path):
    asked: list[str] = []
    page = console.page
    page.on("dialog", lambda dialog: (asked.append(dialog.type), dialog.dismiss()))
    held: list[Route] = []
    page.route("**/files/adapter_model.safetensors", lambda route: held.append(route))
    with page.expect_request("**/files/adapter_model.safetensors"):
        console.upload("elsewhere", twin(tmp_path / "elsewhere", "json"))
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_role("heading", name="Live", exact=True)).to_be_visible()
    with page.expect_event("dialog"):
        page.close(run_before_unload=True)
    page.get_by_role("link", name="Upload").click()
    held[0].continue_()
    console.see_upload_end("ready")
    page.reload()
    console.see_upload_end("ready")
    assert asked == ["beforeunload"]


def test_a_rejected_upload_keeps_its_report_at_its_address(console: Console, tmp_path: Path):
    console.watch.expect_status(400)
    console.upload("qalora", variant(tmp_path / "qalora", "rot13", lambda config: config.update(use_qalora=True)))
    console.see_upload_end("rejected")
    assert re.search(r"#/upload/\w+$", console.page.url)
    console.page.reload()
    console.see_upload_end("rejected")
    expect(console.page.get_by_test_id("check-fail").filter(has_text="use_qalora")).to_be_visible()


def test_a_failed_upload_can_be_retried(console: Console, tmp_path: Path):
    def fail(route: Route) -> None:
        session = route.fetch().json()
        route.fulfill(json={**session, "state": "failed", "result": None, "error": "The engine went away."})

    console.page.route("**/v1/uploads/*?wait_s=*", fail)
    console.upload("again", twin(tmp_path / "again", "json"))
    expect(console.see_upload_end("failed")).to_contain_text("The engine went away.")
    console.let_through("**/v1/uploads/*?wait_s=*")
    console.page.get_by_role("button", name="Try again").click()
    expect(console.see_upload_end("ready")).to_contain_text("Version 1 is live")


def test_retrying_while_the_server_is_unreachable_starts_no_second_upload(
    console: Console, tenant: Tenant, tmp_path: Path
):
    console.watch.expect_no_answer()
    console.watch.expect_status(500)
    page = console.page
    page.route("**/files/adapter_model.safetensors", lambda route: route.fulfill(status=500))
    console.upload("once", twin(tmp_path / "once", "json"))
    expect(page.get_by_test_id("failure")).to_be_visible()
    page.route("**/v1/uploads/*", lambda route: route.abort())
    with page.expect_request("**/v1/uploads/*"):
        page.get_by_role("button", name="Try again").click()
    expect(page.get_by_test_id("failure")).to_contain_text("The server is not responding.")
    for pattern in ("**/v1/uploads/*", "**/files/adapter_model.safetensors"):
        console.let_through(pattern)
    page.get_by_role("button", name="Try again").click()
    console.see_upload_end("ready")
    assert len(tenant.http.get("/v1/uploads").json()["data"]) == 1


def test_an_upload_whose_first_response_was_lost_is_continued(console: Console, tenant: Tenant, tmp_path: Path):
    console.watch.expect_no_answer()
    page = console.page

    def lose(route: Route) -> None:
        route.fetch()
        route.abort()

    page.route("**/v1/adapters/*/uploads", lose)
    console.upload("unheard", twin(tmp_path / "unheard", "json"))
    expect(page.get_by_test_id("failure")).to_contain_text("The server is not responding.")
    console.let_through("**/v1/adapters/*/uploads")
    page.get_by_role("button", name="Try again").click()
    console.see_upload_end("ready")
    assert len(tenant.http.get("/v1/uploads").json()["data"]) == 1


def test_canceling_ends_the_upload_session_on_the_server(console: Console, tenant: Tenant, tmp_path: Path):
    # The first chunk gets no answer, as if the network had just failed.
    console.page.route("**/files/**", lambda _: None)
    console.upload("cancelled", twin(tmp_path / "cancelled", "json"))
    console.page.get_by_role("button", name="Cancel upload").click()
    console.dialog("Cancel the upload of cancelled?").get_by_role("button", name="Cancel upload").click()
    expect(console.see_upload_end("aborted")).to_contain_text("Upload canceled")
    (session,) = tenant.http.get("/v1/uploads").json()["data"]
    assert session["state"] == "aborted"
    assert tenant.http.get("/v1/adapters/cancelled").status_code == 404


def test_an_upload_being_published_cannot_be_canceled_and_is_followed_to_its_end(console: Console, tmp_path: Path):
    console.watch.expect_status(409)
    refusal = {"error": {"message": "It is being published.", "code": "upload_state", "param": None}}

    def refuse(route: Route) -> None:
        if route.request.method == "DELETE":
            route.fulfill(status=409, json=refusal)
        else:
            route.continue_()

    held: list[Route] = []
    page = console.page
    page.route("**/v1/uploads/*", refuse)
    page.route("**/v1/uploads/*?wait_s=*", lambda route: held.append(route))
    with page.expect_request("**/v1/uploads/*?wait_s=*"):
        console.upload("published", twin(tmp_path / "published", "json"))
    page.get_by_role("button", name="Cancel upload").click()
    dialog = console.dialog("Cancel the upload of published?")
    dialog.get_by_role("button", name="Cancel upload").click()
    expect(dialog.get_by_role("alert")).to_contain_text("It is being published.")
    dialog.get_by_role("button", name="Keep upload").click()
    console.let_through("**/v1/uploads/*?wait_s=*")
    for route in held:
        route.continue_()
    expect(console.see_upload_end("ready")).to_contain_text("Version 1 is live")


def test_an_upload_continues_if_its_cancellation_gets_no_response(console: Console, tmp_path: Path):
    console.watch.expect_no_answer()
    page = console.page
    page.route("**/files/adapter_model.safetensors", lambda route: route.abort())
    page.route(
        "**/v1/uploads/*", lambda route: route.abort() if route.request.method == "DELETE" else route.continue_()
    )
    console.upload("uncancelled", twin(tmp_path / "uncancelled", "json"))
    expect(page.get_by_test_id("upload-waits")).to_be_visible()
    page.get_by_role("button", name="Cancel upload").click()
    dialog = console.dialog("Cancel the upload of uncancelled?")
    dialog.get_by_role("button", name="Cancel upload").click()
    expect(dialog.get_by_role("alert")).to_contain_text("The server is not responding.")
    dialog.get_by_role("button", name="Keep upload").click()
    console.let_through("**/files/adapter_model.safetensors")
    expect(console.see_upload_end("ready")).to_contain_text("Version 1 is live")


def test_canceling_an_upload_before_the_server_responds_returns_to_the_form(console: Console, tmp_path: Path):
    page = console.page
    page.route("**/v1/adapters/*/uploads", lambda _: None)
    console.upload("unanswered", twin(tmp_path / "unanswered", "json"))
    page.get_by_role("button", name="Cancel upload").click()
    console.dialog("Cancel the upload of unanswered?").get_by_role("button", name="Cancel upload").click()
    expect(page.get_by_test_id("drop-zone")).to_be_visible()


def test_a_new_version_of_a_shared_adapter_is_shared_too(root: Console, shared: Tenant, tenant: Tenant, tmp_path: Path):
    name = f"of-all-{tenant.name}"
    shared.add(name, ADAPTER_DIR / "uppercase")
    sent_for: list[str | None] = []

    def note(request: Request) -> None:
        if "/uploads" in request.url:
            sent_for.append(request.header_value("x-tenant"))

    page = root.open(f"#/adapters/{name}")
    page.get_by_role("link", name="New version").click()
    expect(page.get_by_test_id("upload-tenant")).to_contain_text("will belong to shared")
    expect(page.get_by_text("adapter add")).to_contain_text("--tenant shared")
    page.get_by_test_id("folder-input").set_input_files(twin(tmp_path / "twin", "uppercase"))
    page.on("request", note)
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(root.see_upload_end("ready")).to_contain_text("Version 2 is live")
    page.reload()
    end = root.see_upload_end("ready")
    assert set(sent_for) == {"shared"}
    end.get_by_role("link", name=f"Open {name}").click()
    expect(page.get_by_test_id("version-2")).to_be_visible()
    found = tenant.http.get(f"/v1/adapters/{name}").json()
    assert (found["tenant"], found["live"]["n"]) == ("shared", 2)


def test_an_upload_for_another_tenant_can_be_resumed_from_its_address(
    root: Console, shared: Tenant, tenant: Tenant, tmp_path: Path
):
    name, folder = f"left-{tenant.name}", twin(tmp_path / "left", "json")
    upload_id = left_open(shared, name, folder, FILES[:1])
    page = root.open("#/upload?tenant=shared")
    page.get_by_test_id("past-upload").get_by_role("link", name=name).click()
    expect(page).to_have_url(f"{root.url}/ui/#/upload/{upload_id}?tenant=shared")
    page.get_by_role("link", name="Continue").click()
    page.get_by_test_id("folder-input").set_input_files(folder)
    page.get_by_role("button", name="Resume upload").click()
    expect(root.see_upload_end("ready")).to_contain_text("Version 1 is live")
    expect(page).to_have_url(f"{root.url}/ui/#/upload/{upload_id}?tenant=shared")
    assert tenant.http.get(f"/v1/adapters/{name}").json()["tenant"] == "shared"


def test_an_upload_for_another_tenant_can_be_canceled_from_its_address(
    root: Console, shared: Tenant, tenant: Tenant, tmp_path: Path
):
    upload_id = left_open(shared, f"left-{tenant.name}", twin(tmp_path / "left", "json"), FILES[:1])
    page = root.open(f"#/upload/{upload_id}?tenant=shared")
    page.get_by_role("button", name="Cancel upload").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel upload").click()
    root.see_upload_end("aborted")
    assert shared.http.get(f"/v1/uploads/{upload_id}").json()["state"] == "aborted"


def test_a_name_prefilled_for_another_tenant_is_cleared_when_switching_to_ones_own(root: Console, tenant: Tenant):
    page = root.open("#/upload?name=of-all&tenant=shared")
    expect(page.locator("input[name=adapter-name]")).to_have_value("of-all")
    page.get_by_role("link", name=f"Upload for {tenant.name} instead").click()
    expect(page.get_by_test_id("upload-tenant")).to_have_count(0)
    expect(page.locator("input[name=adapter-name]")).to_have_value("")

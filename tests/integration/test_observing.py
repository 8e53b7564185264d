"""What a server with keys reports about itself over HTTP, and to whom. The engine is fake."""

import contextlib
import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loraserve.control.ingest.child import OF_THE_FILES
from tests.support.management import (
    ADAPTER_FILES,
    add_adapter,
    client,
    complete,
    fake_adapter,
    new_key,
    offline_admin_key,
)
from tests.support.server_process import ServerProcess, serve_fake, stop, wait_until
from tests.support.valkey import running_valkey

ENDLESS = 1 << 25
TENANTS = ("acme", "globex")


@dataclass(frozen=True, slots=True)
class Observed:
    a: ServerProcess
    b: ServerProcess
    admin: httpx.Client
    acme: httpx.Client
    globex: httpx.Client
    viewer: httpx.Client
    """A viewer of acme."""


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Two servers on one Redis; all clients use the first. Each tenant has an adapter with its own name."""
    folder = tmp_path_factory.mktemp("observed")
    data_dir = folder / "data"
    key = offline_admin_key(data_dir)
    with running_valkey(folder) as valkey, contextlib.ExitStack() as stack:
        options = ("--redis-url", valkey.url)
        a, b = (stack.enter_context(serve_fake(data_dir, *options)) for _ in range(2))
        admin = stack.enter_context(client(a, key))
        operators = []
        for number, tenant in enumerate(TENANTS):
            assert admin.post("/v1/tenants", json={"id": tenant}).status_code == 201
            operator = stack.enter_context(client(a, new_key(admin, tenant, "operator")["secret"]))
            add_adapter(operator, f"of-{tenant}", fake_adapter(folder / tenant, seed=number))
            assert complete(operator, f"of-{tenant}", max_tokens=4).status_code == 200
            operators.append(operator)
        viewer = stack.enter_context(client(a, new_key(admin, "acme", "viewer")["secret"]))
        yield Observed(a, b, admin, *operators, viewer)
        stop(a)
        stop(b)


@contextlib.contextmanager
def streaming(server: ServerProcess, http: httpx.Client, model: str) -> Iterator[Iterator[dict[str, Any]]]:
    """A stream on `server` whose first event has arrived."""
    body = {"model": model, "prompt": [1, 2], "max_tokens": ENDLESS, "stream": True, "ignore_eos": True}
    headers = {"authorization": http.headers["authorization"]}
    with (
        httpx.Client(base_url=server.url, headers=headers, timeout=30) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        next(events)
        yield events


def data(http: httpx.Client, path: str, **query: str | int) -> list[dict[str, Any]]:
    response = http.get(path, params=query)
    assert response.status_code == 200, response.text
    return response.json()["data"]


def everything(http: httpx.Client) -> str:
    """Everything that a tenant's admin can read."""
    paths = (
        *("/v1/live", "/v1/engines", "/v1/series", "/v1/requests", "/v1/usage?group_by=key,adapter,version"),
        *("/v1/adapters", "/v1/usage?group_by=adapter&format=csv", "/v1/audit", "/v1/audit?format=ndjson"),
    )
    answers = [http.get(path) for path in paths]
    assert {answer.status_code for answer in answers} == {200}
    return "".join(answer.text for answer in answers)


class TestTenants:
    def test_a_tenant_learns_nothing_about_another(self, observed: Observed) -> None:
        own_admin = new_key(observed.admin, "acme", "admin")["secret"]
        with client(observed.a, own_admin) as acme, streaming(observed.a, observed.globex, "of-globex"):
            told = everything(acme)
            assert "of-acme" in told
            assert "globex" not in told
            (digest,) = {item["live"]["digest"] for item in data(observed.globex, "/v1/adapters", q="of-globex")}
            assert digest not in told

    def test_version_files_and_report_do_not_reveal_an_earlier_upload(self, observed: Observed, tmp_path: Path) -> None:
        """Uploads the same content as `of-globex`."""
        add_adapter(observed.acme, "copy", fake_adapter(tmp_path / "copy", seed=TENANTS.index("globex")))
        path = "/v1/adapters/copy/versions/1"
        version = observed.acme.get(path).json()
        assert version["digest"] == observed.globex.get("/v1/adapters/of-globex").json()["live"]["digest"]
        for name in ADAPTER_FILES:
            headers = observed.acme.get(f"{path}/files/{name}").headers
            assert headers["etag"] == f'"{version["digest"]}"'
            assert parsedate_to_datetime(headers["last-modified"]).timestamp() == int(version["created_at"])
        report = observed.acme.get(f"{path}/report").json()
        assert report.keys() == {"checks", "object"}, "a certificate's time is that of whoever sent it first"
        assert not {check["name"] for check in report["checks"]} & OF_THE_FILES
        assert observed.acme.delete("/v1/adapters/copy").status_code < 300

    def test_browsers_do_not_cache_one_tenants_data_for_another(self, observed: Observed) -> None:
        """A user who acts for both in turn may find an adapter with the same name and revision at the same URL."""
        version = "/v1/adapters/of-acme/versions/1"
        files = [f"{version}/files/{name}" for name in ADAPTER_FILES]
        for path in ("/v1/tenants/acme", "/v1/adapters/of-acme", version, *files):
            answer = observed.acme.get(path)
            assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")

    def test_a_tenant_sees_only_its_own_requests(self, observed: Observed) -> None:
        for http, name in ((observed.acme, "of-acme"), (observed.globex, "of-globex")):
            assert {found["adapter"] for found in data(http, "/v1/requests")} == {name}
        (newest, *_) = data(observed.globex, "/v1/requests")
        for method in ("GET", "DELETE"):
            foreign = observed.acme.request(method, f"/v1/requests/{newest['id']}")
            missing = observed.acme.request(method, "/v1/requests/missing")
            assert foreign.status_code == missing.status_code == 404
            assert (
                foreign.json()["error"]["message"].replace(newest["id"], "missing")
                == (missing.json()["error"]["message"])
            )

    def test_an_admin_of_all_tenants_sees_all_requests_and_usage(self, observed: Observed) -> None:
        found = data(observed.admin, "/v1/requests", tenant="*", limit=500)
        assert set(TENANTS) <= {request["tenant"] for request in found}
        rows = data(observed.admin, "/v1/usage", group_by="tenant,adapter")
        assert {("acme", "of-acme"), ("globex", "of-globex")} <= {(row["tenant"], row["adapter"]) for row in rows}

    @pytest.mark.parametrize(
        ("path", "role", "status"),
        [
            ("/v1/config", "admin", 403),
            ("/v1/audit", "operator", 403),
            ("/v1/usage?group_by=tenant", "admin", 403),
            ("/v1/requests?tenant=globex", "admin", 403),
            ("/v1/live", "infer", 403),
            ("/v1/live", "viewer", 200),
            ("/v1/series", "viewer", 200),
            ("/v1/usage", "viewer", 200),
            ("/v1/requests", "viewer", 200),
        ],
    )
    def test_a_role_sees_only_the_paths_it_may(self, observed: Observed, path: str, role: str, status: int) -> None:
        with client(observed.a, new_key(observed.admin, "acme", role)["secret"]) as http:
            assert http.get(path).status_code == status


class TestLive:
    def test_either_server_reports_both_engines(self, observed: Observed) -> None:
        with client(observed.b, observed.admin.headers["authorization"].removeprefix("Bearer ")) as other:
            for http in (observed.admin, other):
                # Each server reports to the other once a second.
                wait_until(lambda http=http: len(http.get("/v1/live").json()["engines"]) == 2, "the other's report")
                live = http.get("/v1/live").json()
                assert [engine["id"] for engine in live["engines"]] == ["engine-0", "engine-1"]
                assert {engine["state"] for engine in live["engines"]} == {"ready"}
                assert live["redis"] == "ready"
                engines = data(http, "/v1/engines")
                assert [engine["id"] for engine in engines] == ["engine-0", "engine-1"]
                assert all(engine["weights"] == engine["dtype"] for engine in engines)

    def test_a_poll_without_changes_returns_304_and_no_body(self, observed: Observed) -> None:
        def is_unchanged() -> bool:
            """Two polls in a row, with no change in between."""
            seen = observed.viewer.get("/v1/live")
            again = observed.viewer.get("/v1/live", headers={"if-none-match": seen.headers["etag"]})
            return (again.status_code, again.content) == (304, b"")

        wait_until(is_unchanged, "an idle server that stays the same")


class TestRequests:
    def test_a_request_on_another_server_can_be_listed_and_aborted(self, observed: Observed) -> None:
        with streaming(observed.b, observed.acme, "of-acme") as events:

            def running() -> list[dict[str, Any]]:
                return data(observed.acme, "/v1/requests", state="running")

            wait_until(lambda: len(running()) == 1, "the other server's request in the list")
            (request,) = running()
            assert (request["adapter"], request["route"], request["stream"]) == ("of-acme", "completions", True)
            assert observed.viewer.delete(f"/v1/requests/{request['id']}").status_code == 403
            assert observed.acme.delete(f"/v1/requests/{request['id']}").status_code == 204
            assert [*events][-1]["error"]["code"] == "request_aborted"
        wait_until(lambda: running() == [], "the end of the request")
        ended = observed.acme.get(f"/v1/requests/{request['id']}").json()
        assert (ended["state"], ended["error"]) == ("abort", "request_aborted")
        assert ended["num_output_tokens"] > 0

    def test_each_page_continues_where_the_previous_one_ended(self, observed: Observed) -> None:
        for _ in range(5):
            assert complete(observed.acme, "of-acme").status_code == 200
        whole = [request["id"] for request in data(observed.acme, "/v1/requests", state="length")]
        paged: list[str] = []
        cursor: str | None = None
        while True:
            query = {"state": "length", "limit": 2} | ({} if cursor is None else {"cursor": cursor})
            page = observed.acme.get("/v1/requests", params=query).json()
            paged += [request["id"] for request in page["data"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert paged == whole
        assert len(set(paged)) == len(paged)


class TestUsage:
    def test_adapters_show_their_request_count_last_use_and_latency(self, observed: Observed) -> None:
        (item,) = data(observed.acme, "/v1/adapters", q="of-acme")
        assert item["requests_24h"] is not None
        assert set(item) >= {"last_used_at", "ttft_p95_ms"}

    def test_usage_is_the_same_in_csv_and_json(self, observed: Observed) -> None:
        rows = data(observed.acme, "/v1/usage", group_by="adapter,version")
        answer = observed.acme.get("/v1/usage", params={"group_by": "adapter,version", "format": "csv"})
        assert answer.headers["content-type"].startswith("text/csv")
        assert 'filename="usage.csv"' in answer.headers["content-disposition"]
        table = [*csv.DictReader(io.StringIO(answer.text))]
        assert [(row["adapter"], int(row["requests"])) for row in table] == [
            (row["adapter"], row["num_requests"]) for row in rows
        ]

    @pytest.mark.parametrize(
        ("query", "param"),
        [
            ({"from": "nan"}, "from"),
            ({"from": "1e300"}, "from"),
            ({"group_by": "adapter,x"}, "group_by"),
            ({"interval": "week"}, "interval"),
            ({"interval": "hour", "from": "0"}, "from"),
        ],
    )
    def test_invalid_usage_queries_are_refused_naming_the_parameter(
        self, observed: Observed, query: dict[str, str], param: str
    ) -> None:
        refused = observed.viewer.get("/v1/usage", params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_settings_are_reported_with_their_sources(observed: Observed) -> None:
    found = {item["name"]: item for item in data(observed.admin, "/v1/config")}
    assert (found["port"]["value"], found["port"]["source"]) == ("0", "flag")
    assert (found["redis-url"]["source"], found["max-queued"]["source"]) == ("flag", "default")
    assert (found["host"]["value"], found["host"]["source"]) == ("127.0.0.1", "derived")
    assert (found["dtype"]["value"], found["dtype"]["source"]) == ("float32", "derived")
    assert (found["kv-cache-dtype"]["value"], found["kv-cache-dtype"]["source"]) == ("float32", "derived")
    assert (found["adapter-host-memory-bytes"]["value"], found["adapter-host-memory-bytes"]["source"]) == (
        "0",
        "derived",
    ), "there is none on a CPU"


def test_refusals_are_in_the_audit_trail(observed: Observed) -> None:
    assert observed.viewer.get("/v1/keys").status_code == 403

    def noted() -> bool:
        found = data(observed.admin, "/v1/audit", kind="request")
        return any(act["subject"] == "GET /v1/keys" and act["outcome"] == "refused" for act in found)

    wait_until(noted, "the refusal in the audit trail")


def test_a_downloaded_audit_trail_equals_the_listed_one(observed: Observed) -> None:
    listed = data(observed.admin, "/v1/audit", kind="key", limit=500)
    assert any(entry["after"] is not None for entry in listed)
    query = {"kind": "key", "format": "ndjson"}
    saved = observed.admin.get("/v1/audit", params=query)
    assert saved.headers["content-type"].startswith("application/x-ndjson")
    assert saved.headers["content-disposition"] == 'attachment; filename="audit.ndjson"'
    assert saved.headers["x-content-type-options"] == "nosniff"
    assert [json.loads(line) for line in saved.text.splitlines()] == listed
    table = observed.admin.get("/v1/audit", params={**query, "format": "csv"})
    assert table.headers["content-disposition"] == 'attachment; filename="audit.csv"'
    rows = list(csv.DictReader(io.StringIO(table.text)))
    assert [(row["id"], row["subject"]) for row in rows] == [(entry["id"], entry["subject"]) for entry in listed]
    refused = observed.viewer.get("/v1/audit", params=query)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    empty = observed.admin.get("/v1/audit", params={**query, "action": "no-such"})
    assert (empty.status_code, empty.text) == (200, "")


def test_downloading_an_audit_trail_of_large_documents_takes_little_memory(observed: Observed) -> None:
    names = [f"{number:064}" for number in range(1000)]
    key = observed.admin.post("/v1/keys", json={"role": "infer", "tenant": "acme", "adapters": names}).json()
    for number in range(150):
        assert observed.admin.patch(f"/v1/keys/{key['id']}", json={"name": str(number)}).status_code == 200
    server = psutil.Process(observed.a.process.pid)
    before = server.memory_info().rss
    for wanted in ("csv", "ndjson"):
        with observed.admin.stream("GET", "/v1/audit", params={"format": wanted, "kind": "key"}) as saved:
            for _ in saved.iter_raw():
                assert server.memory_info().rss - before < 16 << 20


@pytest.mark.parametrize("version", ["1", "2"])
def test_every_existing_version_reports_a_certificate_state(observed: Observed, version: str) -> None:
    answer = observed.acme.get(f"/v1/adapters/of-acme/versions/{version}/certificate")
    if version == "2":
        assert answer.status_code == 404
    else:
        assert answer.status_code == 200
        assert answer.json()["state"] in ("pending", "done", "skipped", "failed")

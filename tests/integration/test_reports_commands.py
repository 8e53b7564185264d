"""`loraserve usage`, `audit` and `config` against a real server."""

import csv
import io
import json
from collections.abc import Iterator
from subprocess import CompletedProcess

import pytest

from tests.support.management import client, complete, new_key, offline_admin_key
from tests.support.server_process import run_command, serve_fake, stop, wait_until


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Options for a server to which acme sent two requests and a caller with an unknown key one for the key list."""
    data_dir = tmp_path_factory.mktemp("data")
    admin_key = offline_admin_key(data_dir)
    with serve_fake(data_dir) as server, client(server, admin_key) as admin:
        assert admin.post("/v1/tenants", json={"id": "acme"}).status_code == 201
        with client(server, new_key(admin, "acme", "infer")["secret"]) as acme, client(server, "ls-made_up") as nobody:
            for _ in range(2):
                assert complete(acme, "fake", 3).status_code == 200
            assert nobody.get("/v1/keys").status_code == 401
        as_acme = {"x-tenant": "acme"}

        def is_counted() -> bool:
            rows = admin.get("/v1/usage", headers=as_acme).json()["data"]
            return [row["num_requests"] for row in rows] == [2]

        def is_noted() -> bool:
            return bool(admin.get("/v1/audit", params={"kind": "request"}).json()["data"])

        wait_until(is_counted, "the log is added up")
        wait_until(is_noted, "the refusal in the audit trail")
        yield ["--url", server.url, "--api-key", admin_key]
        stop(server)


def ran(*words: str) -> CompletedProcess[str]:
    done = run_command(*words)
    assert done.returncode == 0, done.stderr
    return done


def test_usage_is_printed_as_a_table_json_or_csv(options: list[str]) -> None:
    table = ran("usage", "--by", "tenant", "--by", "adapter", "--interval", "hour", *options).stdout
    assert "acme" in table
    assert "(base)" in table
    told = json.loads(ran("usage", "--json", "--tenant", "acme", *options).stdout)
    (row,) = told["data"]
    assert (told["complete"], row["num_requests"], row["num_output_tokens"]) == (True, 2, 6)
    (line,) = csv.DictReader(io.StringIO(ran("usage", "--by", "tenant", "--csv", *options).stdout))
    assert (line["tenant"], line["requests"]) == ("acme", "2")
    refused = run_command("usage", "--hours", "100000", *options)
    assert refused.returncode == 1
    assert "Error" in refused.stderr


def test_audit_is_printed_as_a_table_json_or_csv(options: list[str]) -> None:
    table = ran("audit", *options).stdout
    assert "tenant.create" in table
    assert "refused" in table
    entries = json.loads(ran("audit", "--action", "key.", "--json", *options).stdout)
    assert {entry["action"] for entry in entries} == {"key.create"}
    lines = [*csv.DictReader(io.StringIO(ran("audit", "--kind", "tenant", "--csv", *options).stdout))]
    assert "acme" in {line["subject"] for line in lines}


def test_config_shows_the_source_of_a_value(options: list[str]) -> None:
    found = {item["name"]: item for item in json.loads(ran("config", "--json", *options).stdout)}
    assert (found["port"]["value"], found["port"]["source"]) == ("0", "flag")
    assert "redis-grace-s" in ran("config", *options).stdout


def test_keys_are_listed_with_the_adapters_they_may_use(options: list[str]) -> None:
    ran(
        "keys",
        "create",
        "--role",
        "infer",
        "--for-tenant",
        "acme",
        "--adapter",
        "sql",
        "--adapter",
        "support",
        *options,
    )
    narrow, *others = (line for line in ran("keys", "list", *options).stdout.splitlines() if "│" in line)
    assert "sql, support" in narrow
    assert all("all" in line for line in others)

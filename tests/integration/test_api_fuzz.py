"""Requests generated from the OpenAPI document: the server always answers as documented and never with a 5xx but 503.

The examples are the same in every run. The engine is the fake one; adapters, keys, tenants and Redis are real.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import APIOperation, Case
from schemathesis.core.result import Ok
from schemathesis.openapi import from_dict
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from loraserve.api.app import openapi_document
from tests.support.management import add_adapter, client, fake_adapter, new_key, offline_admin_key
from tests.support.server_process import WAIT_S, ServerProcess, serve_fake, stop

EXAMPLES = 20
"""Per operation."""
MOST_TOKENS = 4
OPERATIONS = [
    found.ok()
    for found in from_dict(json.loads(openapi_document())).get_all_operations()
    # The document says too little about /schema, which is Litestar's own.
    if isinstance(found, Ok) and not found.ok().path.startswith("/schema")
]
DOCUMENT_CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@dataclass(frozen=True, slots=True)
class Bench:
    server: ServerProcess
    admin_key: str
    known: dict[str, str | int]
    """Path parameters that name existing objects."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("fuzz")
    admin_key = offline_admin_key(folder / "data")
    with serve_fake(folder / "data") as server, client(server, admin_key) as admin:
        for seed in (1, 2):
            upload = add_adapter(admin, "skill", fake_adapter(folder / str(seed), seed))
        assert admin.post("/v1/tenants", json={"id": "acme"}).status_code == 201
        known = {
            "name": "skill",
            "adapter": "skill",
            "model": "skill",
            "version": 1,
            "alias": "live",
            "file": "adapter_config.json",
            "upload_id": upload["id"],
            "tenant_id": "acme",
            "key_id": new_key(admin, "acme", "infer")["id"],
        }
        yield Bench(server, admin_key, known)
        assert admin.get("/health/ready").status_code == 200
        stop(server)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.label for operation in OPERATIONS])
def test_every_answer_is_as_documented(operation: APIOperation, bench: Bench) -> None:
    @given(case=operation.as_strategy())
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType]
    )
    def check(case: Case) -> None:
        aim(case, bench.known)
        response = case.call(base_url=bench.server.url, headers=bearer(bench.admin_key), timeout=WAIT_S)
        assert response.status_code < 500 or response.status_code == 503, response.text
        is_table = (case.query or {}).get("format") in ("csv", "ndjson")  # Litestar documents only one media type
        case.validate_response(response, checks=DOCUMENT_CHECKS[:1] if is_table else DOCUMENT_CHECKS)

    check()


def aim(case: Case, known: dict[str, str | int]) -> None:
    """Makes about half of the path parameters name existing objects, and keeps waits and answers short."""
    for name, value in (case.path_parameters or {}).items():
        if name in known and zlib.crc32(repr(value).encode()) % 2:
            case.path_parameters[name] = known[name]
    for name in ("wait_s", "drain_s"):
        if name in (case.query or {}):
            case.query[name] = min_of(case.query[name], 0.1)
    if isinstance(case.body, dict):
        body: dict[str, Any] = case.body
        if "model" in body:
            body["model"] = ("skill", "fake", body["model"])[zlib.crc32(repr(body).encode()) % 3]
        for name, holder in (
            ("max_tokens", body),
            ("max_completion_tokens", body),
            ("max_new_tokens", body.get("parameters")),
        ):
            if isinstance(holder, dict) and not isinstance(holder.get(name), str | bool | list | dict):
                holder[name] = min_of(holder.get(name), MOST_TOKENS)


def min_of(value: Any, most: float) -> Any:
    return value if isinstance(value, int | float) and value < most else most


@pytest.mark.parametrize("ttl_s", ["0", "-1", "2592001", "1" + 320 * "0"], ids=["none", "negative", "long", "huge"])
def test_an_invalid_pin_ttl_is_refused_with_its_limits_however_many_digits_it_has(bench: Bench, ttl_s: str) -> None:
    with client(bench.server, bench.admin_key) as admin:
        body = f'{{"tier": "host", "ttl_s": {ttl_s}}}'
        answer = admin.put("/v1/adapters/skill/residency", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    shown = ttl_s if len(ttl_s) < 20 else "beyond 64 bits"
    assert (error["code"], error["param"]) == ("invalid_value", "ttl_s")
    assert error["message"] == f"'ttl_s' is {shown}; it must be between 1 and 2592000."

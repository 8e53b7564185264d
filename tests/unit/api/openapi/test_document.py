import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraserve.api.app import openapi_document
from loraserve.api.route_table import BODIES
from loraserve.api.schemas.body_examples import BODY_EXAMPLES

COMMITTED = Path(__file__).parents[4] / "docs" / "openapi.json"


@pytest.fixture(scope="module")
def operations() -> dict[str, dict[str, Any]]:
    """By "GET /path"."""
    paths = json.loads(openapi_document())["paths"]
    return {f"{method.upper()} {path}": found for path, by in paths.items() for method, found in by.items()}


def test_the_committed_document_is_up_to_date() -> None:
    assert COMMITTED.read_bytes() == openapi_document(), "run `make openapi`"


def test_every_body_has_an_example_that_decodes() -> None:
    assert set(BODY_EXAMPLES) == set(BODIES)
    for body, sent in BODY_EXAMPLES.items():
        msgspec.json.decode(msgspec.json.encode(sent), type=body, strict=True)


def test_every_example_of_an_answer_has_the_fields_of_its_schema() -> None:
    schemas = json.loads(openapi_document())["components"]["schemas"]
    shown = [name for name, schema in schemas.items() if "examples" in schema]
    assert {"AdapterItem", "ChatCompletionResponse", "ModelCard", "UsageRow"} <= set(shown)
    for name in shown:
        for example in schemas[name]["examples"]:
            assert set(schemas[name].get("required", [])) <= set(example) <= set(schemas[name]["properties"]), name


def test_operations_document_the_key_that_they_need(operations: dict[str, dict[str, Any]]) -> None:
    assert operations["GET /health"]["security"] == []
    assert operations["GET /metrics"]["security"] == [{"key": []}]
    assert "`operator` or `admin`" in operations["DELETE /v1/adapters/{name}"]["description"]
    assert "`admin`, for all tenants" in operations["POST /v1/tenants"]["description"]


def test_operations_document_their_error_statuses(operations: dict[str, dict[str, Any]]) -> None:
    for name, operation in operations.items():
        if operation.get("security"):
            assert {"401", "403"} <= operation["responses"].keys(), name
    for name in ("GET /health", "HEAD /ping", "GET /health/ready"):
        assert operations[name]["responses"].keys() == {"200", "503"}


def test_operations_document_the_headers_that_they_use(operations: dict[str, dict[str, Any]]) -> None:
    def headers(operation: str) -> set[str]:
        found = operations[operation].get("parameters", [])
        return {parameter["name"] for parameter in found if parameter["in"] == "header"}

    assert headers("GET /v1/adapters/{name}") == {"If-None-Match"}
    assert "304" in operations["GET /v1/adapters/{name}"]["responses"]
    assert headers("PUT /v1/adapters/{name}/aliases/{alias}") == {"If-Match", "If-None-Match"}
    assert headers("POST /v1/keys") == {"Idempotency-Key"}
    assert headers("PUT /v1/uploads/{upload_id}/files/{file}") == {"Content-Range"}
    assert headers("GET /v1/models") == set()

"""A data directory whose adapters were made for a different base model than the one it serves now."""

from pathlib import Path

import httpx
from msgspec.structs import replace

from loraserve.store.documents import DocumentStore
from loraserve.store.records import AdapterDoc, DocumentKind, adapter_id
from tests.support.management import complete
from tests.support.server_process import WAIT_S, serve, stop
from tests.support.tiny_models import tiny_model, tiny_tokenizer


def test_adapters_of_another_base_are_shown_as_such_and_never_served(tmp_path: Path) -> None:
    data_dir, model = tmp_path / "data", tmp_path / "model"
    tiny_model("llama").save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    with serve(data_dir) as server:
        served = {card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
        stop(server)
    assert {"loraserve-demo", "reverse", "spell"} <= served
    forget_bases(data_dir, "spell")

    with serve(data_dir, str(model)) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
        assert {card["id"] for card in http.get("/v1/models").json()["data"]} == {str(model), "spell"}
        # A recorded base is checked at once; without one, the mismatch shows when the adapter is loaded.
        for name, told in (("reverse", "'loraserve-demo'"), ("spell", "does not fit")):
            answer = complete(http, name)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (409, "adapter_other_base")
            assert told in error["message"]
            assert str(model) in error["message"]
        as_shared = {"x-tenant": "shared"}
        rows = http.get("/v1/adapters", params={"state": "other_base"}, headers=as_shared).json()["data"]
        assert {row["name"] for row in rows} == served - {"loraserve-demo", "spell"}
        (version,) = http.get("/v1/adapters/reverse/versions", headers=as_shared).json()["data"]
        assert (version["fits"], version["bases"]) == (False, ["loraserve-demo"])
        moved = http.put("/v1/adapters/reverse/aliases/beta", json={"version": 1}, headers=as_shared)
        assert (moved.status_code, moved.json()["error"]["code"]) == (409, "adapter_other_base")
        assert complete(http, str(model)).status_code == 200
        stop(server)


def forget_bases(data_dir: Path, name: str) -> None:
    """As if the adapter had been uploaded before bases were recorded."""
    documents = DocumentStore(data_dir)
    document = documents.get(DocumentKind.ADAPTER, adapter_id("shared", name))
    assert document is not None
    assert isinstance(document.doc, AdapterDoc)
    versions = [replace(version, bases=[]) for version in document.doc.versions]
    documents.commit(replace(document, rev=document.rev + 1, doc=replace(document.doc, versions=versions)))

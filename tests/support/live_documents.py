"""Documents and calls for tests of the live view."""

import time

from loraserve.live.admission_records import AdmitCall, FinishCall, Used
from loraserve.live.key_names import DEFAULT_PREFIX, KeyNames
from loraserve.live.leases import Lease
from loraserve.live.live_store import LiveStore
from loraserve.live.requests import EndedRequest, EndState
from loraserve.store.records import (
    AdapterDoc,
    AnyDocument,
    Document,
    DocumentKind,
    KeyDoc,
    Limits,
    Role,
    TenantDoc,
    adapter_id,
)


def tenant_document(name: str = "acme", rev: int = 1) -> Document[TenantDoc]:
    return _document(DocumentKind.TENANT, name, rev, TenantDoc(kv_salt=f"salt of {name}"))


def key_document(key_id: str = "k1", rev: int = 1, tenant: str = "acme") -> Document[KeyDoc]:
    doc = KeyDoc(tenant=tenant, role=Role.INFER, sha256="0" * 64, created_at=1.0)
    return _document(DocumentKind.KEY, key_id, rev, doc)


def adapter_document(name: str = "poet", rev: int = 1, tenant: str = "acme") -> Document[AdapterDoc]:
    return _document(
        DocumentKind.ADAPTER, adapter_id(tenant, name), rev, AdapterDoc(tenant=tenant, name=name, created_at=1.0)
    )


def _document(kind: DocumentKind, document_id: str, rev: int, doc):
    return Document(
        kind=kind, id=document_id, rev=rev, at=time.time(), actor="k0", action=f"{kind}.put", request_id="req", doc=doc
    )


async def build_view(store: LiveStore, *documents: AnyDocument) -> None:
    """Puts these documents into Redis, and has the store accept the view."""
    mark = await store.view.begin()
    for document in documents:
        await store.documents.put(document)
    assert await store.view.accept(mark)


async def build_usual_view(store: LiveStore) -> None:
    await build_view(store, tenant_document(), key_document(), adapter_document())


def lease(request_id: str = "r1", key_id: str | None = "k1", tenant: str = "acme", process: str = "p1") -> Lease:
    return Lease(request_id=request_id, process=process, tenant=tenant, key_id=key_id)


async def num_in_flight(store: LiveStore, tenant: str | None = None) -> int:
    """Number of leases that have not ended, of one tenant or of all."""
    names = KeyNames(DEFAULT_PREFIX)
    name = names.all_leases() if tenant is None else names.tenant_leases(tenant)
    now_ms = await store.connection.server_time_ms()
    return int(await store.connection.call("ZCOUNT", name, now_ms, "+inf"))


def admit_call(
    request_id: str = "r1",
    *,
    reserve: int = 100,
    tenant_limits: Limits = Limits(),  # noqa: B008  # frozen
    key_limits: Limits = Limits(),  # noqa: B008
    key_id: str | None = "k1",
    tenant_rev: int = 1,
    key_rev: int = 1,
    adapter: Used | None = None,
) -> AdmitCall:
    return AdmitCall(
        lease=lease(request_id, key_id),
        tenant_rev=tenant_rev,
        tenant_limits=tenant_limits,
        key_rev=None if key_id is None else key_rev,
        key_limits=key_limits,
        adapter=adapter,
        reserve_tokens=reserve,
    )


def finish_call(
    admitted: AdmitCall,
    *,
    unused: int = 0,
    state: EndState = EndState.COMPLETED,
    was_admitted: bool = True,
) -> FinishCall:
    held = admitted.lease
    return FinishCall(
        lease=held,
        request=EndedRequest(request_id=held.request_id, tenant=held.tenant, state=state, at=time.time()),
        unused_tokens=unused,
        was_admitted=was_admitted,
        tenant_limits=admitted.tenant_limits,
        key_limits=admitted.key_limits,
    )

"""Login links for users who may write to a server's data directory; no key needed."""

import asyncio
import time
from pathlib import Path
from shlex import quote

import msgspec
import rich_click as click

from loraserve.cli.admin.data_owner import acting_as_owner
from loraserve.control.requests.snapshot_records import ProcessSnapshot
from loraserve.control.tenancy.sessions import new_link
from loraserve.live.audit import AuditEntry
from loraserve.live.errors import LiveUnavailableError, LiveUrlError
from loraserve.live.live_store import LiveStore
from loraserve.live.server_place import socket_url
from loraserve.live.snapshots import SnapshotKind
from loraserve.store.documents import DocumentStore
from loraserve.store.records import ANY_TENANT, Document, DocumentKind, KeyDoc, Role, Status, is_a

ACTOR = "cli"
CALL_S = 5.0


def link_from_data_dir(
    data_dir: Path, key_id: str | None, redis_url: str | None, redis_prefix: str, fallback_url: str
) -> str:
    """fallback_url: for a server that has not published its address."""
    key = _key(data_dir.expanduser(), key_id)
    store_url = redis_url or _private_server(data_dir.expanduser())
    try:
        return asyncio.run(_make(store_url, redis_prefix, key, fallback_url))
    except LiveUnavailableError as error:
        message = f"no server runs on {data_dir}: start it, or give its --redis-url ({error})"
        raise click.ClickException(message) from error
    except LiveUrlError as error:
        raise click.ClickException(str(error)) from error


async def _make(store_url: str, prefix: str, key: Document[KeyDoc], fallback_url: str) -> str:
    live = LiveStore(store_url, prefix, timeout_s=CALL_S)
    try:
        urls = [
            msgspec.json.decode(snapshot.body, type=ProcessSnapshot).url
            for snapshot in await live.snapshots.all(SnapshotKind.PROCESS)
        ]
        now = time.time()
        token, link = new_link(key.id, key.doc.sha256, now)
        await live.sessions.put_link(link)
        entry = AuditEntry(at=now, actor=ACTOR, action="session.link", tenant=key.doc.tenant, kind="session", id=key.id)
        await live.audit.append(entry)
    finally:
        await live.close()
    base = next(filter(None, urls), fallback_url).rstrip("/")
    return f"{base}/ui/#/login/{token}"


def _key(data_dir: Path, key_id: str | None) -> Document[KeyDoc]:
    with acting_as_owner(data_dir):
        documents = [each for each in DocumentStore(data_dir).scan(DocumentKind.KEY) if is_a(each, KeyDoc)]
    keys = [document for document in documents if _may_log_in(document.doc) and key_id in (None, document.id)]
    if key_id is None:
        keys = [key for key in keys if key.doc.role is Role.ADMIN and key.doc.tenant == ANY_TENANT]
    if not keys:
        what = "admin key for all tenants ('*')" if key_id is None else f"key {key_id!r} that may log in"
        how = f"loraserve keys create --role admin --data-dir {quote(str(data_dir))}"
        raise click.ClickException(f"{data_dir} has no {what}: create one with `{how}`")
    return max(keys, key=lambda key: key.doc.created_at)


def _may_log_in(key: KeyDoc) -> bool:
    is_over = key.expires_at is not None and key.expires_at <= time.time()
    return key.status is Status.ACTIVE and not is_over and key.role is not Role.INFER


def _private_server(data_dir: Path) -> str:
    try:
        return socket_url((data_dir / "kv" / "socket.path").read_text().removesuffix("\n"))
    except OSError as error:
        message = f"{data_dir} has no private Redis: give the --data-dir of the server, or its --redis-url"
        raise click.ClickException(message) from error

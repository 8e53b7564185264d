"""The newest revision of every document, mirrored for all processes."""

from collections.abc import Mapping, Sequence

import msgspec

from loraserve.live.audit import NUM_ENTRIES, AuditEntry
from loraserve.live.changes import NUM_CHANGES
from loraserve.live.connection import LiveConnection
from loraserve.live.errors import LiveRefusedError, LiveUnavailableError
from loraserve.live.key_names import KeyNames
from loraserve.live.script_loader import load_script
from loraserve.live.server_link import Arg
from loraserve.store.codec import DocumentCodec
from loraserve.store.records import AnyDocument, DocumentKind, TenantDoc

AT_ONCE = 500
"""Documents per round trip; 500 took 5 ms."""


class LiveDocuments:
    """Every method raises LiveUnavailableError."""

    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names
        self._put = load_script("doc_put")
        self._retire = load_script("doc_retire")
        self._codec = DocumentCodec()

    async def check_writable(self) -> None:
        """Raises unless Redis takes writes now: one that is full, a replica or without replicas may answer a PING."""
        await self._connection.call("SET", self._names.probe(), 1, "EX", 1)

    async def is_full(self) -> bool:
        """Whether Redis answers, but accepts no new data now. Admission still works then."""
        try:
            await self.check_writable()
        except LiveRefusedError:
            return True
        return False

    async def put(self, document: AnyDocument) -> int:
        """Idempotent, in any order: only a newer revision has an effect (stored, listed, added to changes and audit).

        Returns the revision that Redis has now: higher than the one put if another process was faster, or if the disk
        was restored from an older copy.
        """
        names = self._names
        keys = [
            *(names.document(document.kind, document.id), names.document_ids(document.kind)),
            *(names.changes(), names.audit()),
        ]
        audit = msgspec.json.encode(_audit_entry(document))
        body = self._codec.encode(document)
        args = [document.kind, document.id, document.rev, body, audit, NUM_CHANGES, NUM_ENTRIES]
        reply_id, rev = await self._connection.run_script(self._put, keys, args)
        if reply_id != document.id.encode():
            raise LiveUnavailableError(f"Redis answered about {reply_id!r} instead of {document.id!r}")
        return rev

    async def revs(self, refs: Sequence[tuple[DocumentKind, str]]) -> list[int]:
        """Revisions of these documents, in one round trip; 0 = Redis does not have the document."""
        commands = [["HGET", self._names.document(kind, document_id), "rev"] for kind, document_id in refs]
        return [int(rev or 0) for rev in await self._connection.call_many(commands)]

    async def ids(self, kind: DocumentKind) -> list[str]:
        """Ids of all documents of a kind, including deleted ones."""
        return [id_.decode() for id_ in await self._connection.call("ZRANGE", self._names.document_ids(kind), 0, -1)]

    async def all_revs(self, kind: DocumentKind) -> dict[str, int]:
        """Revisions of all documents of a kind, including deleted ones, by id."""
        found: dict[str, int] = {}
        for ids in _groups(await self.ids(kind)):
            commands = [["HGET", self._names.document(kind, document_id), "rev"] for document_id in ids]
            revs = await self._connection.call_many(commands)
            found |= {id_: int(rev) for id_, rev in zip(ids, revs, strict=True) if rev is not None}
        return found

    async def get(self, kind: DocumentKind, document_id: str) -> AnyDocument | None:
        """Redis's copy, which may be older than the disk's; None if it is missing or cannot be decoded."""
        body = await self._connection.call("HGET", self._names.document(kind, document_id), "body")
        try:
            return None if body is None else self._codec.decode(kind, body)
        except msgspec.DecodeError:
            return None

    async def retire(self, kind: DocumentKind, highest_rev: int, revs: Mapping[str, int]) -> int:
        """Removes documents unless they are newer than the given revisions: their ids may have been used again.

        highest_rev: the highest that was ever retired of this kind, as far as the caller knows. Returns the highest
        that Redis knows.
        """
        names = self._names
        keys = [names.removed_documents(), names.document_ids(kind), *(names.document(kind, id_) for id_ in revs)]
        args: list[Arg] = [kind, highest_rev]
        for document_id, rev in revs.items():
            args += [document_id, rev]
        return await self._connection.run_script(self._retire, keys, args)

    async def removed_rev(self, kind: DocumentKind) -> int:
        """Redis's copy of `DocumentStore.removed_rev`; 0 = nothing of the kind was ever retired."""
        return await self.retire(kind, 0, {})

    async def remove(self, kind: DocumentKind, document_ids: Sequence[str]) -> None:
        """Ignores missing documents. NOTE: only for ids that are never put again, not even as a newer document."""
        for ids in _groups(document_ids):
            # In this order: if interrupted in between, the ids are still listed and so found again.
            await self._connection.call("DEL", *(self._names.document(kind, document_id) for document_id in ids))
            await self._connection.call("ZREM", self._names.document_ids(kind), *ids)


def _groups(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[at : at + AT_ONCE] for at in range(0, len(ids), AT_ONCE)]


def _audit_entry(document: AnyDocument) -> AuditEntry:
    doc = document.doc
    return AuditEntry(
        at=document.at,
        actor=document.actor,
        action=document.action,
        tenant=document.id if isinstance(doc, TenantDoc) else doc.tenant,
        request_id=document.request_id,
        kind=document.kind,
        id=document.id,
        rev=document.rev,
    )

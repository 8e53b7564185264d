"""Versions of an adapter: published by uploads, deleted by people."""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from loraserve.control.documents.adapter_edits import (
    Content,
    add_version,
    find_published,
    keep_newest,
    remove_version,
    version_of,
    versions_of,
)
from loraserve.control.documents.declarations import Declarations
from loraserve.control.names.adapter_access import AdapterAccess
from loraserve.control.tenancy.authenticator import Authenticator
from loraserve.control.tenancy.principal import Action, Principal
from loraserve.control.tenancy.quota import Quota
from loraserve.serving.errors import invalid_value
from loraserve.store.errors import InvalidNameError
from loraserve.store.names import check_adapter_name
from loraserve.store.records import AdapterDoc, BaseRecord, Document, VersionRecord, adapter_id
from loraserve.store.upload_session import UploadSession


@dataclass(frozen=True, slots=True)
class Published:
    document: Document[AdapterDoc]
    version: VersionRecord
    created: bool
    """False: the adapter had a version with this content already."""


class VersionService:
    """Called on the event loop. Every method raises `ServingError`."""

    def __init__(
        self,
        access: AdapterAccess,
        declarations: Declarations,
        quota: Quota,
        authenticator: Authenticator,
        *,
        base: BaseRecord,
        served_names: Sequence[str],
        keep_versions: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """base: the one that uploads are checked against. served_names: those by which requests ask for it, which no
        adapter may have.

        keep_versions: per adapter, see `keep_newest`; None = all.
        """
        self._access = access
        self._declarations = declarations
        self._quota = quota
        self._authenticator = authenticator
        self._base = base
        self._served_names = served_names
        self._keep_versions = keep_versions
        self._clock = clock

    def check_name(self, name: str, param: str = "name") -> None:
        """Whether an adapter may have this name. param: the request field that contains it."""
        try:
            check_adapter_name(name, self._served_names)
        except InvalidNameError as error:
            raise invalid_value(param, f"is refused: {error}.") from None

    async def check_may_publish(self, principal: Principal, name: str) -> None:
        """Checks by the newest documents, whenever the principal was authenticated. Raises `ServingError`: 401, 403 or
        503."""
        await self._authenticator.reread(principal)
        self._check_still_may(principal, name)

    async def publish(
        self,
        principal: Principal,
        request_id: str,
        name: str,
        content: Content,
        *,
        activate: bool = True,
        unpublished: Sequence[UploadSession] = (),
    ) -> Published:
        """Publish for the acting tenant. The first version always becomes live. Idempotent by upload id and by digest.

        The blob must be in the store; this is not checked here. unpublished: uploads of the tenant that ended without a
        version. NOTE: an upload takes as long as its sender likes, so a principal that may no longer publish when the
        upload is committed is refused: 401 or 403.
        """
        self.check_name(name)
        tenant = principal.acting_tenant
        created = False

        def change(current: Document[AdapterDoc] | None) -> AdapterDoc:
            nonlocal created
            self._check_still_may(principal, name)
            doc = current.doc if current is not None else None
            created = doc is None or doc.deleted_at is not None or find_published(doc, content) is None
            if created:
                others = [upload for upload in unpublished if upload.kept and upload.kept.digest != content.digest]
                self._quota.check(tenant, name, content.size_bytes, unpublished=others)
            now = self._clock()
            doc = add_version(doc, tenant, name, content, self._base, activate=activate, by=principal.actor, now=now)
            if not created or self._keep_versions is None:
                return doc
            return keep_newest(doc, self._keep_versions, now=now)

        document = await self._declarations.edit(
            AdapterDoc,
            adapter_id(tenant, name),
            change,
            actor=principal.actor,
            action="version.publish",
            request_id=request_id,
            turn=self._turn(principal),
        )
        version = find_published(document.doc, content)
        assert version is not None
        return Published(document, version, created)

    @contextlib.asynccontextmanager
    async def _turn(self, principal: Principal) -> AsyncGenerator[None]:
        """The tenant's quota turn. The principal is reread in it, to be as recent as the quota."""
        async with self._quota.turn(principal.acting_tenant):
            await self._authenticator.reread(principal)
            yield

    def _check_still_may(self, principal: Principal, name: str) -> None:
        newest = self._authenticator.newest(principal)
        newest.require(Action.OPERATE)
        newest.require_adapter(name)

    async def list(self, principal: Principal, name: str) -> tuple[Document[AdapterDoc], list[VersionRecord]]:
        """Newest first, without deleted ones; like `read`, includes whatever any server committed before this call."""
        document = await self._access.read(principal, name)
        return document, versions_of(document.doc)[::-1]

    async def read(self, principal: Principal, name: str, n: int) -> tuple[Document[AdapterDoc], VersionRecord]:
        document = await self._access.read(principal, name)
        return document, version_of(document.doc, n)

    async def delete(
        self, principal: Principal, request_id: str, name: str, n: int, *, expected_rev: int | None = None
    ) -> Document[AdapterDoc]:
        """Refused (409) while an alias or canary refers to it. Its number is never used again."""
        return await self._access.edit(
            principal,
            request_id,
            name,
            "version.delete",
            lambda doc: remove_version(doc, n, now=self._clock()),
            expected_rev=expected_rev,
        )

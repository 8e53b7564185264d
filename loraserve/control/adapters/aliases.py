"""Aliases: names that refer to versions and are moved atomically."""

import secrets
import time
from collections.abc import Callable

from loraserve.control.documents.adapter_edits import (
    CanaryShare,
    alias_versions,
    move_alias,
    remove_alias,
    roll_back,
    version_of,
)
from loraserve.control.names.adapter_access import AdapterAccess
from loraserve.control.names.served_base import check_fits
from loraserve.control.tenancy.principal import Principal
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.errors import InvalidNameError
from loraserve.store.names import check_alias_name
from loraserve.store.records import LIVE_ALIAS, AdapterDoc, BaseRecord, Document

MAX_ALIASES = 64


class AliasService:
    """Called on the event loop. Every method raises `ServingError`: 409 if an alias would then refer to a version that
    was not made for the served base."""

    def __init__(self, access: AdapterAccess, base: BaseRecord, *, clock: Callable[[], float] = time.time) -> None:
        self._access = access
        self._base = base
        self._clock = clock

    async def put(
        self,
        principal: Principal,
        request_id: str,
        name: str,
        alias: str,
        version: int,
        *,
        canary: CanaryShare | None = None,
        expected_rev: int | None = None,
        create_only: bool = False,
    ) -> Document[AdapterDoc]:
        """create_only: `If-None-Match: *`; 412 if the alias exists. Putting the present value again changes nothing."""
        _check_name(alias)
        salt = secrets.token_hex(8)

        def change(doc: AdapterDoc) -> AdapterDoc:
            if alias in doc.aliases:
                if create_only:
                    message = f"'{name}@{alias}' exists, but If-None-Match: * requires that it does not."
                    raise ServingError(ErrorCode.PRECONDITION_FAILED, message)
            elif len(doc.aliases) >= MAX_ALIASES:
                message = f"'{name}' has {MAX_ALIASES} aliases, which is the limit. Delete one first."
                raise ServingError(ErrorCode.CONFLICT, message)
            return self._checked(move_alias(doc, alias, version, canary, salt=salt, now=self._clock()), alias)

        return await self._access.edit(principal, request_id, name, "alias.move", change, expected_rev=expected_rev)

    async def delete(
        self, principal: Principal, request_id: str, name: str, alias: str, *, expected_rev: int | None = None
    ) -> Document[AdapterDoc]:
        """`live` cannot be deleted."""
        return await self._access.edit(
            principal,
            request_id,
            name,
            "alias.delete",
            lambda doc: remove_alias(doc, alias),
            expected_rev=expected_rev,
        )

    async def rollback(
        self,
        principal: Principal,
        request_id: str,
        name: str,
        alias: str = LIVE_ALIAS,
        *,
        expected_rev: int | None = None,
    ) -> Document[AdapterDoc]:
        """Return to the version before the last move; a second rollback undoes the first. Ends a canary."""
        return await self._access.edit(
            principal,
            request_id,
            name,
            "alias.rollback",
            lambda doc: self._checked(roll_back(doc, alias, now=self._clock()), alias),
            expected_rev=expected_rev,
        )

    def _checked(self, doc: AdapterDoc, alias: str) -> AdapterDoc:
        for n in sorted(alias_versions(doc.aliases[alias])):
            check_fits(doc, version_of(doc, n), self._base)
        return doc


def _check_name(alias: str) -> None:
    try:
        check_alias_name(alias)
    except InvalidNameError as error:
        raise invalid_value("alias", f"is refused: {error}.") from None

"""Converts key documents into the items of /v1/keys."""

import time

import msgspec

from loraserve.api.schemas.keys import CreatedKey, KeyItem
from loraserve.control.tenancy.key_documents import IssuedKey
from loraserve.store.records import Document, KeyDoc


def key_item(document: Document[KeyDoc]) -> KeyItem:
    key, now = document.doc, time.time()
    is_rotating = key.previous_until is not None and key.previous_until > now
    return KeyItem(
        id=document.id,
        name=key.name,
        tenant=key.tenant,
        role=key.role,
        adapters=key.adapters,
        limits=key.limits,
        status=key.status,
        is_expired=key.expires_at is not None and key.expires_at <= now,
        created_at=key.created_at,
        expires_at=key.expires_at,
        rotating_until=key.previous_until if is_rotating else None,
        rev=document.rev,
    )


def created_key(issued: IssuedKey) -> CreatedKey:
    return CreatedKey(**msgspec.structs.asdict(key_item(issued.document)), secret=issued.text)

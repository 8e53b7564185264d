"""How each operation changes a key's document, and which values are valid. Pure: time and secrets are arguments."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from loraserve.control.tenancy.api_keys import NewKey
from loraserve.control.tenancy.limit_checks import check_limits
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.names import ADAPTER_NAME
from loraserve.store.records import Document, KeyDoc, Limits, Role, Status

MAX_NAME_CHARACTERS = 200
MAX_ALLOWED_ADAPTERS = 1000
MAX_LIFE_S = 100 * 365 * 24 * 3600


@dataclass(frozen=True, slots=True)
class KeyPatch:
    """Unset fields stay as they are."""

    name: str | UnsetType = UNSET
    role: Role | UnsetType = UNSET
    adapters: list[str] | UnsetType | None = UNSET
    limits: Limits | UnsetType = UNSET
    status: Status | UnsetType = UNSET
    """Active or suspended; revoking is `KeyService.revoke`."""
    expires_at: float | UnsetType | None = UNSET
    """Unix time; None = never."""


@dataclass(frozen=True, slots=True)
class IssuedKey:
    document: Document[KeyDoc]
    text: str
    """The whole key, shown only once."""


def new_doc(
    new: NewKey,
    *,
    role: Role,
    tenant: str,
    name: str,
    adapters: Sequence[str] | None,
    limits: Limits,
    expires_at: float | None,
    now: float,
) -> KeyDoc:
    doc = KeyDoc(
        tenant=tenant,
        role=role,
        name=name,
        adapters=None if adapters is None else [*adapters],
        limits=limits,
        sha256=new.sha256,
        expires_at=expires_at,
        created_at=now,
    )
    check(doc, now)
    return doc


def patched(doc: KeyDoc, patch: KeyPatch, now: float) -> KeyDoc:
    """Raises `ServingError`."""
    changed = replace(
        doc,
        name=doc.name if isinstance(patch.name, UnsetType) else patch.name,
        role=doc.role if isinstance(patch.role, UnsetType) else patch.role,
        adapters=doc.adapters if isinstance(patch.adapters, UnsetType) else patch.adapters,
        limits=doc.limits if isinstance(patch.limits, UnsetType) else patch.limits,
        status=doc.status if isinstance(patch.status, UnsetType) else patch.status,
        expires_at=doc.expires_at if isinstance(patch.expires_at, UnsetType) else patch.expires_at,
    )
    if changed.status is Status.REVOKED:
        raise invalid_value("status", "is 'revoked'; it must be 'active' or 'suspended'. Delete the key instead.")
    check(changed, now if changed.expires_at != doc.expires_at else None)
    return changed


def rotated(doc: KeyDoc, new: NewKey, grace_s: float, now: float) -> KeyDoc:
    """With a new secret; the previous one works for another `grace_s`."""
    return replace(
        doc,
        sha256=new.sha256,
        previous_sha256=doc.sha256 if grace_s else None,
        previous_until=now + grace_s if grace_s else None,
    )


def check(doc: KeyDoc, now: float | None) -> None:
    """now: None if the expiry did not change; then it may have passed. Raises `ServingError`."""
    if len(doc.name) > MAX_NAME_CHARACTERS:
        raise invalid_value("name", f"has {len(doc.name)} characters; at most {MAX_NAME_CHARACTERS} are allowed.")
    if doc.adapters is not None:
        if len(doc.adapters) > MAX_ALLOWED_ADAPTERS:
            raise invalid_value(
                "adapters", f"has {len(doc.adapters)} names; at most {MAX_ALLOWED_ADAPTERS} are allowed."
            )
        for adapter in doc.adapters:
            if not ADAPTER_NAME.fullmatch(adapter):
                raise invalid_value("adapters", f"has {adapter[:80]!r}, which cannot be an adapter's name.")
    if now is not None and doc.expires_at is not None:
        if doc.expires_at <= now:
            raise invalid_value("expires_at", f"is {doc.expires_at:g}, which is in the past. Give it in Unix seconds.")
        if doc.expires_at > now + MAX_LIFE_S:
            message = f"is {doc.expires_at:g}, more than 100 years from now. Give it in Unix seconds; null = never."
            raise invalid_value("expires_at", message)
    check_limits(doc.limits, of_tenant=False)


def gone_since(document: Document[KeyDoc], now: float) -> float | None:
    """Unix time since which the key has been revoked or expired, without a later change; None if it is neither."""
    doc = document.doc
    if doc.status is Status.REVOKED:
        return document.at
    if doc.expires_at is None or now < doc.expires_at:
        return None
    return max(doc.expires_at, document.at)


def key_not_found(key_id: str) -> ServingError:
    return ServingError(ErrorCode.NOT_FOUND, f"The key '{key_id[:64]}' does not exist.")

"""How deleting, restoring and erasing change a tenant's document. Pure: time is an argument."""

from datetime import UTC, datetime
from enum import StrEnum

from msgspec.structs import replace

from loraserve.control.documents.adapter_edits import RESTORABLE_S
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import DEFAULT_TENANT, SHARED_TENANT, Document, Status, TenantDoc

DAY_S = 86_400.0
BUILTIN_TENANTS = frozenset({DEFAULT_TENANT, SHARED_TENANT})


class TenantState(StrEnum):
    ACTIVE = "active"
    SUSPENDED = "suspended"
    DRAINING = "draining"
    """Deleted, but requests are still ending or an engine still has its adapters."""
    DELETED = "deleted"
    """Restorable for 24 h; after that, what it owned is being removed."""
    ERASED = "erased"
    """Nothing of it is left but its id and its usage."""


def state_of(doc: TenantDoc, *, is_in_use: bool) -> TenantState:
    """is_in_use: whether anything of it still runs."""
    if doc.deleted_at is None:
        return TenantState.ACTIVE if doc.status is Status.ACTIVE else TenantState.SUSPENDED
    if doc.erased_at is not None:
        return TenantState.ERASED
    return TenantState.DRAINING if is_in_use else TenantState.DELETED


def check_deletable(tenant: str) -> None:
    """Raises `ServingError` (409)."""
    if tenant in BUILTIN_TENANTS:
        message = f"'{tenant}' is a built-in tenant and cannot be deleted. Suspend it instead."
        raise ServingError(ErrorCode.CONFLICT, message)


def mark_deleted(doc: TenantDoc, *, now: float) -> TenantDoc:
    """A tenant that is deleted already stays as it is: its 24 h do not start again."""
    return doc if doc.deleted_at is not None else replace(doc, deleted_at=now)


def mark_restored(tenant: str, doc: TenantDoc, *, now: float) -> TenantDoc:
    if doc.deleted_at is None:
        return doc
    if not _is_restorable(doc, now):
        message = (
            f"The tenant '{tenant}' was deleted {_day(doc.deleted_at)}, more than 24 hours ago: "
            "it is erased and cannot be restored."
        )
        raise ServingError(ErrorCode.CONFLICT, message)
    return replace(doc, deleted_at=None)


def is_overdue(doc: TenantDoc, now: float) -> bool:
    """Whether it was deleted long enough ago to be erased, and is not being erased yet."""
    return doc.deleted_at is not None and not doc.is_erasing and not _is_restorable(doc, now)


def mark_erasing(doc: TenantDoc, *, now: float) -> TenantDoc:
    """Keeps only the fact that the tenant existed, so that its id is not reused. A restored one is not touched."""
    if not is_overdue(doc, now):
        return doc
    return TenantDoc(status=doc.status, kv_salt="", deleted_at=doc.deleted_at, is_erasing=True)


def mark_erased(doc: TenantDoc, *, now: float) -> TenantDoc:
    """Changes only a tenant that is being erased."""
    return replace(doc, erased_at=now) if doc.is_erasing and doc.erased_at is None else doc


def was_there_since(doc: TenantDoc, since: float) -> bool:
    """Whether it may have used anything on the day of `since` or later."""
    return doc.deleted_at is None or doc.deleted_at + DAY_S >= since


def id_taken(tenant: Document[TenantDoc], now: float) -> ServingError:
    """For creating a tenant whose id exists or existed."""
    deleted_at = tenant.doc.deleted_at
    if deleted_at is None:
        message = f"The tenant '{tenant.id}' already exists."
    elif _is_restorable(tenant.doc, now):
        message = (
            f"The tenant '{tenant.id}' was deleted {_day(deleted_at)} and can be restored until "
            f"{_day(deleted_at + RESTORABLE_S)}: POST /v1/tenants/{tenant.id}/restore, or "
            f"`loraserve tenants restore {tenant.id}`. Its id cannot be reused."
        )
    else:
        message = (
            f"The tenant '{tenant.id}' was deleted {_day(deleted_at)}. Its usage is kept under that id, which "
            "therefore cannot be reused. Choose another id."
        )
    return ServingError(ErrorCode.CONFLICT, message, param="id")


def tenant_not_found(tenant: str, param: str | None = None) -> ServingError:
    return ServingError(ErrorCode.NOT_FOUND, f"The tenant '{tenant[:64]}' does not exist.", param=param)


def tenant_deleted(tenant: str) -> ServingError:
    """For requests that were running then."""
    return ServingError(ErrorCode.NOT_FOUND, f"The tenant '{tenant}' was deleted while the request ran.")


def _is_restorable(doc: TenantDoc, now: float) -> bool:
    return doc.deleted_at is not None and not doc.is_erasing and now < doc.deleted_at + RESTORABLE_S


def _day(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"

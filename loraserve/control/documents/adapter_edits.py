"""How each management operation changes an adapter's document. Pure: time and randomness are arguments."""

import math

import msgspec
from msgspec.structs import replace

from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.blobs import SWEPT_WITHIN_S
from loraserve.store.records import LIVE_ALIAS, AdapterDoc, Alias, BaseRecord, Canary, ClassifierRecord, VersionRecord

RESTORABLE_S = 24 * 3600.0
MAX_WEIGHT_BP = 10_000
MAX_VERSIONS = 1000
"""Per adapter, including deleted ones while their content is on disk. Each adds 364 bytes to every later revision."""


class Content(msgspec.Struct, frozen=True):
    """A validated blob that is to become a version."""

    digest: str
    upload_id: str
    size_bytes: int
    """Of the source files."""
    max_rank: int
    targets: list[str]
    """Kinds of modules, sorted."""
    invocation_token_ids: list[int] = []
    """See `VersionRecord`."""
    classifier: ClassifierRecord | None = None
    """Likewise."""
    chat_template: str | None = None
    """Likewise."""
    trained_token_ids: list[int] = []
    """Likewise."""
    own_tables: list[str] = []
    """Likewise."""
    use_dora: bool = False
    use_rslora: bool = False


class CanaryShare(msgspec.Struct, frozen=True):
    version: int
    weight_bp: int
    """Hundredths of a percent, 0 to 10,000."""


def versions_of(doc: AdapterDoc) -> list[VersionRecord]:
    """Those that are not deleted, oldest first."""
    return [version for version in doc.versions if version.deleted_at is None]


def find_version(doc: AdapterDoc, n: int) -> VersionRecord | None:
    """None also if it is deleted."""
    return next((version for version in doc.versions if version.n == n and version.deleted_at is None), None)


def live_version(doc: AdapterDoc) -> VersionRecord | None:
    """The version that the bare name means, ignoring a canary."""
    alias = doc.aliases.get(LIVE_ALIAS)
    return None if alias is None else find_version(doc, alias.version)


def version_of(doc: AdapterDoc, n: int) -> VersionRecord:
    """Raises `ServingError` (404)."""
    version = find_version(doc, n)
    if version is None:
        raise ServingError(ErrorCode.NOT_FOUND, f"The adapter '{doc.name}' has no version {n}.", param="version")
    return version


def wants(doc: AdapterDoc, *, now: float, restorable: bool) -> set[str]:
    """Digests that the document refers to.

    restorable: include a deleted adapter that can be restored; its contents must stay on disk, but not in the engine.
    """
    if doc.deleted_at is not None and not (restorable and now < doc.deleted_at + RESTORABLE_S):
        return set()
    return {version.digest for version in versions_of(doc)}


def kept_until(doc: AdapterDoc, version: VersionRecord) -> float:
    """Approximate Unix time until which a version's content stays on disk; infinite if nothing is deleted."""
    swept_at = version.created_at + SWEPT_WITHIN_S
    if version.deleted_at is not None:
        return swept_at
    return math.inf if doc.deleted_at is None else max(swept_at, doc.deleted_at + RESTORABLE_S)


def add_version(
    doc: AdapterDoc | None,
    tenant: str,
    name: str,
    content: Content,
    base: BaseRecord,
    *,
    activate: bool,
    by: str,
    now: float,
) -> AdapterDoc:
    """The adapter with the content as a version: its present one with this digest or upload, else a new one.

    doc: None = a new adapter. A deleted one starts over: its versions are gone for good, their numbers stay used.
    Deleted versions whose content is no longer on disk are dropped.

    base: the one that the content was checked against.
    """
    if doc is None:
        doc = AdapterDoc(tenant=tenant, name=name, created_at=now)
    elif doc.deleted_at is not None:
        doc = emptied(doc, now)
    version = find_published(doc, content)
    if version is None:
        version = VersionRecord(
            n=1 + max((version.n for version in doc.versions), default=0),
            digest=content.digest,
            upload_id=content.upload_id,
            created_at=now,
            by=by,
            size_bytes=content.size_bytes,
            max_rank=content.max_rank,
            targets=content.targets,
            bases=[base],
            invocation_token_ids=content.invocation_token_ids,
            classifier=content.classifier,
            chat_template=content.chat_template,
            trained_token_ids=content.trained_token_ids,
            own_tables=content.own_tables,
            use_dora=content.use_dora,
            use_rslora=content.use_rslora,
        )
        # Otherwise the document, and each of its revisions, would grow with every version ever published.
        kept = [version for version in doc.versions if now < kept_until(doc, version)]
        doc = replace(doc, versions=[*kept, version])
    elif version.upload_id == content.upload_id:
        # The same commit again: keep whatever was done with the version since.
        return doc
    else:
        doc = _with_base(doc, version, base)
    if activate or LIVE_ALIAS not in doc.aliases:
        doc = move_alias(doc, LIVE_ALIAS, version.n, None, salt="", now=now)
    return doc


def _with_base(doc: AdapterDoc, version: VersionRecord, base: BaseRecord) -> AdapterDoc:
    if any(known.fingerprint == base.fingerprint for known in version.bases):
        return doc
    known = replace(version, bases=[*version.bases, base])
    return replace(doc, versions=[known if found.n == known.n else found for found in doc.versions])


def check_num_versions(doc: AdapterDoc, *, now: float) -> None:
    """Whether another may be added. doc: without the versions that adding it drops. Raises `ServingError` (429)."""
    num_deleted = sum(version.deleted_at is not None and now < kept_until(doc, version) for version in doc.versions)
    num_versions = len(versions_of(doc)) + num_deleted
    if num_versions < MAX_VERSIONS:
        return
    of_deleted = f", {num_deleted} of them deleted within the last 70 minutes" if num_deleted else ""
    message = (
        f"The adapter '{doc.name}' has {num_versions} versions{of_deleted}; at most {MAX_VERSIONS} are allowed. "
        "Delete versions that are no longer needed, or let the server do it: loraserve serve --keep-versions N."
    )
    raise ServingError(ErrorCode.INSUFFICIENT_QUOTA, message)


def find_published(doc: AdapterDoc, content: Content) -> VersionRecord | None:
    """The version that this content was published as, if any."""
    versions = versions_of(doc)
    by_upload = next((version for version in versions if version.upload_id == content.upload_id), None)
    return by_upload or next((version for version in versions if version.digest == content.digest), None)


def move_alias(
    doc: AdapterDoc, alias: str, version: int, canary: CanaryShare | None, *, salt: str, now: float
) -> AdapterDoc:
    """salt: for a canary that begins now. Users in a canary stay in it while only its weight is raised."""
    version_of(doc, version)
    old = doc.aliases.get(alias)
    kept = old.canary if old is not None else None
    new_canary = None if canary is None else _canary(doc, version, canary, kept, salt)
    if old is not None and old.version == version and old.canary == new_canary:
        return doc
    if old is None or old.version == version:
        previous = old.previous if old is not None else None
    else:
        previous = old.version
    return _with_alias(doc, alias, Alias(version=version, previous=previous, canary=new_canary, moved_at=now))


def remove_alias(doc: AdapterDoc, alias: str) -> AdapterDoc:
    if alias == LIVE_ALIAS:
        message = (
            f"'{LIVE_ALIAS}' cannot be deleted: the bare adapter name resolves to it. Move it, or disable the adapter."
        )
        raise ServingError(ErrorCode.CONFLICT, message, param="alias")
    alias_of(doc, alias)
    return replace(doc, aliases={name: value for name, value in doc.aliases.items() if name != alias})


def roll_back(doc: AdapterDoc, alias: str, *, now: float) -> AdapterDoc:
    """Swaps with the previous version, so that a second rollback undoes the first."""
    old = alias_of(doc, alias)
    if old.previous is None:
        message = (
            f"'{doc.name}@{alias}' has no version to roll back to: it was never moved, or that version was deleted."
        )
        raise ServingError(ErrorCode.CONFLICT, message, param="alias")
    return _with_alias(doc, alias, Alias(version=old.previous, previous=old.version, moved_at=now))


def remove_version(doc: AdapterDoc, n: int, *, now: float) -> AdapterDoc:
    version_of(doc, n)
    leading = sorted(name for name, alias in doc.aliases.items() if n in alias_versions(alias))
    if leading:
        names = ", ".join(f"'{name}'" for name in leading)
        message = (
            f"Version {n} of '{doc.name}' is still the target or the canary of {names}. "
            "Move the alias or end its canary first."
        )
        raise ServingError(ErrorCode.CONFLICT, message, param="version")
    return replace(
        doc,
        versions=[replace(version, deleted_at=now) if version.n == n else version for version in doc.versions],
        aliases={
            name: replace(alias, previous=None) if alias.previous == n else alias for name, alias in doc.aliases.items()
        },
    )


def keep_newest(doc: AdapterDoc, num_versions: int, *, now: float) -> AdapterDoc:
    """Deletes older versions than these, except those that an alias or canary refers to or a rollback returns to."""
    kept: set[int | None] = {version.n for version in versions_of(doc)[-num_versions:]}
    for alias in doc.aliases.values():
        kept |= {*alias_versions(alias), alias.previous}
    versions = [
        version if version.deleted_at is not None or version.n in kept else replace(version, deleted_at=now)
        for version in doc.versions
    ]
    return replace(doc, versions=versions)


def mark_deleted(doc: AdapterDoc, *, now: float, drain_until: float) -> AdapterDoc:
    return replace(doc, deleted_at=now, drain_until=drain_until, pin=None)


def mark_restored(doc: AdapterDoc, *, now: float) -> AdapterDoc:
    if doc.deleted_at is None:
        return doc
    if now >= doc.deleted_at + RESTORABLE_S:
        raise ServingError(ErrorCode.CONFLICT, f"'{doc.name}' was deleted more than 24 hours ago. Upload it again.")
    return replace(doc, deleted_at=None, drain_until=None)


def alias_of(doc: AdapterDoc, alias: str) -> Alias:
    """Raises `ServingError` (404)."""
    found = doc.aliases.get(alias)
    if found is None:
        raise ServingError(ErrorCode.NOT_FOUND, f"The adapter '{doc.name}' has no alias '{alias}'.", param="alias")
    return found


def _canary(doc: AdapterDoc, version: int, share: CanaryShare, kept: Canary | None, salt: str) -> Canary:
    if not 0 <= share.weight_bp <= MAX_WEIGHT_BP:
        raise invalid_value("canary.weight_bp", f"is {share.weight_bp}; it must be 0 to {MAX_WEIGHT_BP}.")
    version_of(doc, share.version)
    if share.version == version:
        raise invalid_value("canary.version", f"is {version}, which the alias already points to.")
    if kept is not None and kept.version == share.version:
        salt = kept.salt
    return Canary(version=share.version, weight_bp=share.weight_bp, salt=salt)


def alias_versions(alias: Alias) -> set[int]:
    """Numbers of the versions that the alias refers to: two with a canary."""
    return {alias.version} if alias.canary is None else {alias.version, alias.canary.version}


def _with_alias(doc: AdapterDoc, name: str, alias: Alias) -> AdapterDoc:
    return replace(doc, aliases={**doc.aliases, name: alias})


def emptied(doc: AdapterDoc, now: float) -> AdapterDoc:
    """A deleted adapter that starts over."""
    gone = [version if version.deleted_at is not None else replace(version, deleted_at=now) for version in doc.versions]
    return AdapterDoc(tenant=doc.tenant, name=doc.name, created_at=now, versions=gone)

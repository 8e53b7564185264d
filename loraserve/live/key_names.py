"""The names of all keys in Redis. They share one hash tag, so they are in one slot, on one node of a cluster."""

import hashlib
import re
from dataclasses import dataclass

DEFAULT_PREFIX = "ls"
PREFIX_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,32}")
PREFIX_RULE = "must be 1 to 32 characters from A-Z a-z 0-9 _ . -"
PART_PATTERN = re.compile(r"[^\s:{},\x00-\x1f\x7f]{1,512}")
"""A part between the colons of a key; excludes characters that could turn it into another key."""

ANY_COUNTER = "*"
"""Glob of the names of all usage counters."""
_GLOB_CHARACTER = re.compile(r"[*?\[\]\\]")


@dataclass(slots=True, frozen=True)
class KeyNames:
    """Raises ValueError for a part that could be read as several parts."""

    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not PREFIX_PATTERN.fullmatch(self.prefix):
            raise ValueError(f"--redis-prefix {self.prefix!r} {PREFIX_RULE}")

    def meta(self) -> str:
        """Hash: schema, epoch."""
        return self._name("meta")

    def probe(self) -> str:
        """String, written only to test whether Redis takes writes."""
        return self._name("probe")

    def document(self, kind: str, document_id: str) -> str:
        """Hash: rev, body."""
        return self._name("d", kind, document_id)

    def document_ids(self, kind: str) -> str:
        """Sorted set: ids."""
        return self._name("i", kind)

    def removed_documents(self) -> str:
        """Hash: kind → at least the highest revision of any retired document, as in `docs/removed`."""
        return self._name("removed")

    def changes(self) -> str:
        """Stream: kind, id, rev."""
        return self._name("changes")

    def audit(self) -> str:
        """Stream: one entry per management action, login or refusal."""
        return self._name("audit")

    def key_bucket(self, key_id: str) -> str:
        """Hash: levels of the request and token buckets."""
        return self._name("b", "k", key_id)

    def tenant_bucket(self, tenant: str) -> str:
        return self._name("b", "t", tenant)

    def key_leases(self, key_id: str) -> str:
        """Sorted set: request id → end of its lease, Unix ms."""
        return self._name("l", "k", key_id)

    def tenant_leases(self, tenant: str) -> str:
        return self._name("l", "t", tenant)

    def all_leases(self) -> str:
        """Sorted set: `Lease.member()` → its end, Unix ms."""
        return self._name("l", "all")

    def publish_lease(self, tenant: str) -> str:
        """String: the holder's token."""
        return self._name("l", "p", tenant)

    def request(self, request_id: str) -> str:
        """String: how the request ended."""
        return self._name("rq", request_id)

    def recent_requests(self, tenant: str) -> str:
        """Stream: ended requests. Expires once the tenant sends no more requests."""
        return self._name("r", tenant)

    def snapshot(self, kind: str, owner: str) -> str:
        return self._name(kind, owner)

    def snapshot_owners(self, kind: str) -> str:
        """Sorted set: owner → when last seen, Unix ms by the owner's clock."""
        return self._name("i", kind)

    def aborts(self, process: str) -> str:
        """Set: requests of that process to be aborted."""
        return self._name("a", process)

    def usage_hour(self, tenant: str, hour: str) -> str:
        """Hash: `<key>,<adapter>,<version>,<metric>` → sum."""
        return self._name("u", tenant, "h", hour)

    def usage_day(self, tenant: str, day: str) -> str:
        return self._name("u", tenant, "d", day)

    def usage_offsets(self) -> str:
        """Hash: log → number of its bytes applied."""
        return self._name("off")

    def series(self, engine: str, interval_s: int) -> str:
        """Stream: one sample per interval."""
        return self._name("m", engine, f"{interval_s}s")

    def session(self, token_sha256: str) -> str:
        return self._name("s", token_sha256)

    def key_sessions(self, key_id: str) -> str:
        """Sorted set: hash of a session's token → its end, Unix ms."""
        return self._name("s", "k", key_id)

    def login_link(self, token_sha256: str) -> str:
        return self._name("o", token_sha256)

    def idempotency(self, tenant: str, client_key: str) -> str:
        """`client_key` is arbitrary text from a client."""
        return self._name("x", tenant, hashlib.sha256(client_key.encode()).hexdigest())

    def _name(self, *parts: str) -> str:
        for part in parts:
            if not PART_PATTERN.fullmatch(part):
                raise ValueError(f"{part!r} cannot be part of a key in Redis")
        return f"{{{self.prefix}}}:{':'.join(parts)}"


def usage_field(key_id: str, adapter: str, version: int, metric: str) -> str:
    """Raises ValueError for a part that contains a comma."""
    parts = (key_id, adapter, str(version), metric)
    for part in parts:
        if not PART_PATTERN.fullmatch(part):
            raise ValueError(f"{part!r} cannot be part of a usage counter's name")
    return ",".join(parts)


def usage_glob(*, key_id: str | None = None, adapter: str | None = None) -> str:
    """Matches every counter of this key and this adapter, also as `<owner>/<adapter>`, and few others.

    None = any. Both may be arbitrary text.
    """
    key_part = "" if key_id is None else _escaped(key_id)
    if adapter is not None:
        return f"{key_part}*[,/]{_escaped(adapter)},*"
    return f"{key_part},*" if key_part else ANY_COUNTER


def usage_metrics_glob(initials: str) -> str:
    """Matches every counter whose metric begins with one of these letters, and no other."""
    return f"*,*,*,[{initials}]*"


def _escaped(text: str) -> str:
    return _GLOB_CHARACTER.sub(r"\\\g<0>", text)

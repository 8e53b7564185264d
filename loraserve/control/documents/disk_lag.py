"""Documents of which Redis reported a newer revision than the disk has, so that nobody knows what they allow."""

import logging
from collections.abc import Callable, Iterator

from loraserve.store.records import DocumentKind, DocumentRef

_WHAT_TO_DO = "Give this server its own --redis-prefix, or empty that Redis."

logger = logging.getLogger(__name__)


class DiskLag:
    """Happens if the data directory is an older copy, or does not show yet what another server wrote."""

    def __init__(self, known_rev: Callable[[DocumentRef], int]) -> None:
        """known_rev: the newest revision that was read from disk, 0 = none."""
        self._known_rev = known_rev
        self._missing_revs: dict[DocumentRef, int] = {}
        """Documents of which Redis knows something newer: the disk's counts again from this revision on."""
        self._lost_revs: dict[DocumentKind, int] = {}
        """Up to which revisions documents were retired, if Redis knows this and the disk does not; else 0."""

    def has(self, ref: DocumentRef) -> bool:
        return self._known_rev(ref) < self._missing_revs.get(ref, 0)

    def of_kind(self, kind: DocumentKind) -> Iterator[DocumentRef]:
        return (ref for ref in self._missing_revs if ref[0] is kind)

    def compare(self, ref: DocumentRef, rev: int) -> None:
        """Redis has this revision of it, 0 = none; the disk was read after that."""
        known_rev, lost_rev = self._known_rev(ref), self._lost_revs.get(ref[0], 0)
        if known_rev < rev:
            if self._missing_revs.get(ref, 0) < rev:
                logger.error(
                    "Redis knows revision %d of %s %r, which the data directory does not have: is it an older copy? "
                    "Requests that need it are refused. %s",
                    rev,
                    *ref,
                    _WHAT_TO_DO,
                )
            self._missing_revs[ref] = rev
        elif rev < known_rev <= lost_rev:
            # Redis no longer has it: it may be one of those that were retired.
            self._missing_revs[ref] = lost_rev + 1
        else:
            self._missing_revs.pop(ref, None)

    def note_read(self, ref: DocumentRef) -> None:
        """A newer revision was read from the disk."""
        if not self.has(ref):
            self._missing_revs.pop(ref, None)

    def compare_retired(self, kind: DocumentKind, rev: int, known_rev: int) -> None:
        """Documents were retired up to `rev` according to Redis, up to `known_rev` according to the disk."""
        self._lost_revs[kind] = rev if rev > known_rev else 0
        if self._lost_revs[kind]:
            logger.error(
                "Redis knows that documents of the kind %s were removed up to revision %d, the data directory only up "
                "to %d: is it an older copy? Requests that need one of them are refused. %s",
                kind,
                rev,
                known_rev,
                _WHAT_TO_DO,
            )

    def is_missing_removals(self, kind: DocumentKind) -> bool:
        """Whether Redis knows of removals that the disk does not."""
        return self._lost_revs.get(kind, 0) > 0

    def may_be_retired(self, kind: DocumentKind, rev: int) -> bool:
        """Whether a document of this revision may be one whose removal the disk does not know of."""
        return rev <= self._lost_revs.get(kind, 0)

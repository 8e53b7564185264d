"""Compares the revisions that Redis reported with those read from disk, document by document."""

import logging

import pytest

from loraserve.control.documents.disk_lag import DiskLag
from loraserve.store.records import DocumentKind

KEY = (DocumentKind.KEY, "k1")
OTHER = (DocumentKind.KEY, "k2")
TENANT = (DocumentKind.TENANT, "t1")


class Disk(dict[tuple[DocumentKind, str], int]):
    """The newest revision of each document on disk."""

    def rev(self, ref: tuple[DocumentKind, str]) -> int:
        return self.get(ref, 0)


@pytest.fixture
def disk() -> Disk:
    return Disk({KEY: 5})


@pytest.fixture
def lag(disk: Disk) -> DiskLag:
    return DiskLag(disk.rev)


@pytest.mark.parametrize("rev", [0, 4, 5])
def test_a_disk_with_at_least_the_revision_of_redis_is_not_behind(lag: DiskLag, rev: int) -> None:
    lag.compare(KEY, rev)
    assert not lag.has(KEY)
    assert not [*lag.of_kind(DocumentKind.KEY)]


def test_the_disk_is_behind_until_it_has_the_revision_that_redis_reported(lag: DiskLag, disk: Disk) -> None:
    lag.compare(KEY, 7)
    lag.compare(TENANT, 1)
    assert [*lag.of_kind(DocumentKind.KEY)] == [KEY]
    assert not lag.has(OTHER)
    disk[KEY] = 6
    lag.note_read(KEY)
    assert lag.has(KEY)
    disk[KEY] = 7
    lag.note_read(KEY)
    assert not lag.has(KEY)
    assert not [*lag.of_kind(DocumentKind.KEY)]
    assert lag.has(TENANT)


def test_the_disk_is_not_behind_once_redis_no_longer_has_the_document(lag: DiskLag) -> None:
    lag.compare(KEY, 7)
    lag.compare(KEY, 0)
    assert not lag.has(KEY)


def test_each_missing_revision_is_logged_once(lag: DiskLag, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for rev in (7, 7, 8):
            lag.compare(KEY, rev)
    assert [record.getMessage()[:34] for record in caplog.records] == [
        "Redis knows revision 7 of key 'k1'",
        "Redis knows revision 8 of key 'k1'",
    ]


def test_a_possibly_retired_document_is_behind_until_it_is_newer_than_all_retired_ones(
    lag: DiskLag, disk: Disk
) -> None:
    lag.compare_retired(DocumentKind.KEY, rev=9, known_rev=3)
    assert lag.is_missing_removals(DocumentKind.KEY)
    assert not lag.is_missing_removals(DocumentKind.TENANT)
    assert [lag.may_be_retired(DocumentKind.KEY, rev) for rev in (5, 9, 10)] == [True, True, False]
    lag.compare(KEY, 0)
    assert lag.has(KEY)
    disk[KEY] = 9
    assert lag.has(KEY)
    disk[KEY] = 10
    assert not lag.has(KEY)


def test_a_document_that_redis_has_at_the_same_revision_was_not_retired(lag: DiskLag) -> None:
    lag.compare_retired(DocumentKind.KEY, rev=9, known_rev=3)
    lag.compare(KEY, 5)
    assert not lag.has(KEY)


@pytest.mark.parametrize("known_rev", [9, 10])
def test_a_disk_that_knows_of_all_removals_is_missing_none(lag: DiskLag, known_rev: int) -> None:
    lag.compare_retired(DocumentKind.KEY, rev=12, known_rev=3)
    lag.compare_retired(DocumentKind.KEY, rev=9, known_rev=known_rev)
    assert not lag.is_missing_removals(DocumentKind.KEY)
    assert not lag.may_be_retired(DocumentKind.KEY, 1)

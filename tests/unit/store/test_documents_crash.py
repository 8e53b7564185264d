from pathlib import Path

from loraserve.store.documents import DocumentStore
from loraserve.store.records import DocumentKind
from tests.support.crash_points import crash_points
from tests.support.store_documents import adapter_document, revisions

ADAPTER = DocumentKind.ADAPTER


def test_a_crash_anywhere_leaves_complete_revisions_and_the_commit_can_be_repeated(tmp_path: Path) -> None:
    names = iter(range(1000))
    data_dir = tmp_path

    def prepare() -> None:
        nonlocal data_dir
        data_dir = tmp_path / str(next(names))

    def work() -> None:
        store = DocumentStore(data_dir)
        for rev in (1, 2):
            store.commit(adapter_document("sql", rev))

    seen: list[int] = []
    for _ in crash_points(prepare, work):
        damages: list[Exception] = []
        store = DocumentStore(data_dir, on_damage=damages.append)
        newest = store.get(ADAPTER, "acme/sql")
        seen.append(newest.rev if newest is not None else 0)
        assert [document.rev for document in store.scan(ADAPTER)] == [rev for rev in seen[-1:] if rev]
        for rev in range(seen[-1] + 1, 4):
            store.commit(adapter_document("sql", rev))
        assert [document.rev for document in revisions(store, "acme/sql", 4)] == [3, 2, 1]
        assert damages == []
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2}

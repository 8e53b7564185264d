import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from loraserve.store.blobs import SWEPT_WITHIN_S
from loraserve.store.errors import DamagedFileError, OffsetError, UploadFileError, UploadNotFoundError, UploadStateError
from loraserve.store.upload_session import (
    CHUNK_BYTES,
    NO_REPORT,
    KeptContent,
    UploadFile,
    UploadResult,
    UploadSession,
    UploadState,
)
from loraserve.store.uploads import EXPIRE_AFTER_S, KEEP_FINAL_S, UploadStore
from tests.support.crash_points import crash_points

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = [UploadFile(name=CONFIG, size_bytes=4, sha256="ab" * 32), UploadFile(name=WEIGHTS, size_bytes=10)]


@pytest.fixture
def store(tmp_path: Path) -> UploadStore:
    return UploadStore(tmp_path / "data")


def create(store: UploadStore, tenant: str = "acme", now: float | None = None) -> UploadSession:
    return store.create(tenant=tenant, name="sql", actor="abcdefgh", files=FILES, now=now)


def become(state: UploadState) -> Callable[[UploadSession], UploadSession]:
    return lambda session: msgspec.structs.replace(session, state=state)


def fill(store: UploadStore, upload_id: str) -> None:
    store.append(upload_id, CONFIG, 0, b"{  }")
    store.append(upload_id, WEIGHTS, 0, b"0123456789")


def upload_files(tmp_path: Path, upload_id: str) -> set[str]:
    return set(os.listdir(tmp_path / "data" / "uploads" / upload_id)) - {"lock", "claim"}


def test_a_new_upload_is_open_and_readable_by_every_process(store: UploadStore, tmp_path: Path) -> None:
    session = create(store, now=1000.0)
    assert (session.state, session.chunk_bytes, session.activate) == (UploadState.OPEN, CHUNK_BYTES, True)
    assert (session.created_at, session.expires_at) == (1000.0, 1000.0 + EXPIRE_AFTER_S)
    assert session.report == NO_REPORT
    assert session.size_bytes == 14
    assert UploadStore(tmp_path / "data").load(session.id) == session
    assert len({create(store).id for _ in range(20)}) == 20


@pytest.mark.parametrize(
    "names",
    [
        [],
        [CONFIG],
        [CONFIG, CONFIG, WEIGHTS],
        [CONFIG, "adapter_model.bin"],
        [CONFIG, WEIGHTS, "../x"],
        ["\ud800", CONFIG],
    ],
)
def test_an_upload_without_exactly_the_two_files_is_refused(store: UploadStore, names: list[str]) -> None:
    files = [UploadFile(name=name, size_bytes=1) for name in names]
    with pytest.raises(UploadFileError, match="each once; announced: "):
        store.create(tenant="acme", name="sql", actor="open", files=files)
    assert store.sessions() == []


def test_a_negative_size_is_refused(store: UploadStore) -> None:
    files = [UploadFile(name=CONFIG, size_bytes=-1), UploadFile(name=WEIGHTS, size_bytes=1)]
    with pytest.raises(UploadFileError, match="-1 bytes"):
        store.create(tenant="acme", name="sql", actor="open", files=files)


def test_bytes_are_appended_and_counted(store: UploadStore) -> None:
    upload_id = create(store).id
    assert store.append(upload_id, WEIGHTS, 0, b"0123") == 4
    assert store.append(upload_id, WEIGHTS, 4, memoryview(b"45")) == 6
    assert store.append(upload_id, WEIGHTS, 6, b"") == 6
    session = store.load(upload_id)
    assert [(file.name, file.received_bytes, file.is_complete) for file in session.files] == [
        (CONFIG, 0, False),
        (WEIGHTS, 6, False),
    ]
    assert store.part_path(upload_id, WEIGHTS).read_bytes() == b"012345"
    store.append(upload_id, WEIGHTS, 6, b"6789")
    store.append(upload_id, CONFIG, 0, b"{  }")
    assert store.load(upload_id).is_complete


@pytest.mark.parametrize("offset", [-1, 0, 3, 5, 1 << 60])
def test_a_wrong_offset_is_refused_with_the_right_one(store: UploadStore, offset: int) -> None:
    upload_id = create(store).id
    store.append(upload_id, WEIGHTS, 0, b"0123")
    with pytest.raises(OffsetError) as caught:
        store.append(upload_id, WEIGHTS, offset, b"45")
    assert caught.value.actual == 4
    assert store.part_path(upload_id, WEIGHTS).read_bytes() == b"0123"


def test_more_bytes_than_announced_are_refused(store: UploadStore) -> None:
    upload_id = create(store).id
    with pytest.raises(UploadFileError, match="would have 5 bytes, but 4 were announced"):
        store.append(upload_id, CONFIG, 0, b"12345")
    assert store.load(upload_id).files[0].received_bytes == 0


@pytest.mark.parametrize("name", ["README.md", "../session.json", "session.json", "", "x" * 3000])
def test_a_file_that_was_not_announced_is_refused(store: UploadStore, tmp_path: Path, name: str) -> None:
    upload_id = create(store).id
    with pytest.raises(UploadFileError, match="is not part of upload"):
        store.append(upload_id, name, 0, b"1")
    with pytest.raises(UploadFileError):
        store.part_path(upload_id, name)
    assert upload_files(tmp_path, upload_id) == {"session.json"}


@pytest.mark.parametrize("upload_id", ["", "..", "../uploads", "a" * 32, "A" * 32, "a" * 32 + "\n", "x" * 5000])
def test_an_unknown_or_impossible_id_is_not_found(store: UploadStore, upload_id: str) -> None:
    for use in (
        store.load,
        store.prepare,
        lambda i: store.append(i, CONFIG, 0, b""),
        lambda i: store.update(i, lambda session: session),
    ):
        with pytest.raises(UploadNotFoundError):
            use(upload_id)
    with pytest.raises(UploadNotFoundError), store.claim(upload_id):
        pass


def test_bytes_are_synced_before_they_are_counted(store: UploadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    upload_id = create(store).id
    synced: list[int] = []
    fdatasync = os.fdatasync

    def recorded(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", recorded)
    store.append(upload_id, WEIGHTS, 0, b"0123")
    store.append(upload_id, WEIGHTS, 4, b"45")
    assert synced == [4, 6]


def test_bytes_whose_sync_failed_are_not_counted_and_can_be_sent_again(
    store: UploadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_id = create(store).id
    store.append(upload_id, WEIGHTS, 0, b"0123")

    def failing(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", failing)
        with pytest.raises(OSError, match="Input/output"):
            store.append(upload_id, WEIGHTS, 4, b"4567")
    assert store.load(upload_id).files[1].received_bytes == 4
    assert store.append(upload_id, WEIGHTS, 4, b"456789") == 10
    assert store.part_path(upload_id, WEIGHTS).read_bytes() == b"0123456789"


def test_a_short_write_is_continued(store: UploadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    upload_id = create(store).id
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:3], offset))
    assert store.append(upload_id, WEIGHTS, 0, b"0123456789") == 10
    assert store.part_path(upload_id, WEIGHTS).read_bytes() == b"0123456789"


def test_a_ready_upload_keeps_report_and_result_but_not_its_bytes(store: UploadStore, tmp_path: Path) -> None:
    upload_id = create(store).id
    fill(store, upload_id)
    store.update(upload_id, become(UploadState.VALIDATING))
    assert (store.prepare(upload_id) / WEIGHTS).read_bytes() == b"0123456789"
    report = msgspec.Raw(b'{"checks":[{"name":"rank","found":[1,2]}]}')
    result = UploadResult(version=3, digest="ab" * 32, created=True)
    store.update(upload_id, lambda s: msgspec.structs.replace(s, state=UploadState.LOADING, report=report))
    store.update(upload_id, lambda s: msgspec.structs.replace(s, state=UploadState.READY, result=result))
    session = UploadStore(tmp_path / "data").load(upload_id)
    assert session.state is UploadState.READY
    assert bytes(session.report) == bytes(report)
    assert session.result == result
    assert [file.received_bytes for file in session.files] == [4, 10]
    assert upload_files(tmp_path, upload_id) == {"session.json"}


@pytest.mark.parametrize("state", UploadState)
def test_only_allowed_state_transitions_are_stored(store: UploadStore, state: UploadState) -> None:
    upload_id = create(store).id
    if UploadState.OPEN.can_become(state) or state is UploadState.OPEN:
        assert store.update(upload_id, become(state)).state is state
    else:
        with pytest.raises(UploadStateError, match=f"is open: cannot become {state}"):
            store.update(upload_id, become(state))
        assert store.load(upload_id).state is UploadState.OPEN


def test_a_final_state_is_never_left() -> None:
    for state in UploadState:
        if state.is_final:
            assert not any(state.can_become(other) for other in UploadState)
        else:
            assert state.can_become(UploadState.ABORTED)


def test_an_update_that_raises_changes_nothing(store: UploadStore) -> None:
    session = create(store)

    def refuse(session: UploadSession) -> UploadSession:
        raise UploadStateError(session.id, session.state, "do this")

    with pytest.raises(UploadStateError):
        store.update(session.id, refuse)
    assert store.load(session.id) == session


@pytest.mark.parametrize("state", [UploadState.VALIDATING, UploadState.ABORTED])
def test_an_upload_that_is_not_open_refuses_bytes(store: UploadStore, state: UploadState) -> None:
    upload_id = create(store).id
    store.update(upload_id, become(state))
    with pytest.raises(UploadStateError, match="cannot accept more bytes"):
        store.append(upload_id, CONFIG, 0, b"1")


def test_the_prepared_folder_has_the_adapters_files_and_can_be_prepared_again(store: UploadStore) -> None:
    upload_id = create(store).id
    store.append(upload_id, CONFIG, 0, b"{  }")
    with pytest.raises(UploadStateError, match="before all bytes have arrived"):
        store.prepare(upload_id)
    store.append(upload_id, WEIGHTS, 0, b"0123456789")
    folder = store.prepare(upload_id)
    (folder / "manifest.json").write_text("{}")
    assert store.prepare(upload_id) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {CONFIG: b"{  }", WEIGHTS: b"0123456789"}


def test_an_upload_whose_content_was_published_before_the_crash_can_be_prepared_again(
    store: UploadStore, tmp_path: Path
) -> None:
    upload_id = create(store).id
    fill(store, upload_id)
    store.prepare(upload_id).rename(tmp_path / "published")
    assert (store.prepare(upload_id) / WEIGHTS).read_bytes() == b"0123456789"


def test_only_one_process_can_claim_an_upload(store: UploadStore, tmp_path: Path) -> None:
    upload_id = create(store).id
    other = UploadStore(tmp_path / "data")
    with store.claim(upload_id) as is_ours:
        assert is_ours
        with other.claim(upload_id) as is_others:
            assert not is_others
    with other.claim(upload_id) as is_others:
        assert is_others


@pytest.mark.parametrize("state", [UploadState.VALIDATING, UploadState.LOADING])
def test_recovery_reopens_commits_of_dead_processes_only(
    store: UploadStore, tmp_path: Path, state: UploadState
) -> None:
    dead, living, untouched = create(store).id, create(store).id, create(store).id
    for upload_id in (dead, living):
        fill(store, upload_id)
        store.update(upload_id, become(UploadState.VALIDATING))
        store.update(upload_id, become(state))
    with UploadStore(tmp_path / "data").claim(living):
        assert [session.id for session in store.recover()] == [dead]
    assert store.load(dead).state is UploadState.OPEN
    assert store.load(dead).is_complete
    assert store.load(living).state is state
    assert store.load(untouched).state is UploadState.OPEN


def test_uploads_are_listed_newest_first_and_by_tenant(store: UploadStore) -> None:
    ids = [create(store, tenant=tenant, now=now).id for tenant, now in [("a", 1.0), ("b", 3.0), ("a", 2.0)]]
    assert [session.id for session in store.sessions()] == [ids[1], ids[2], ids[0]]
    assert [session.id for session in store.sessions("a")] == [ids[2], ids[0]]
    assert store.sessions("c") == []


def test_uploads_that_can_still_be_published_are_counted(store: UploadStore) -> None:
    first, second, of_another = create(store, tenant="a"), create(store, tenant="a"), create(store, tenant="b")
    for _ in range(2):
        assert {session.id for session in store.counted("a")} == {first.id, second.id}
    store.update(first.id, become(UploadState.ABORTED))
    for _ in range(2):
        assert [session.id for session in store.counted("a")] == [second.id]
    store.remove(second.id)
    assert store.counted("a") == []
    assert [session.id for session in store.counted("b")] == [of_another.id]


def loading(store: UploadStore) -> str:
    """The id of an upload in state LOADING whose content was stored at time 1000."""
    upload_id = create(store).id
    kept = KeptContent(digest="ab" * 32, at=1000.0)
    store.update(upload_id, become(UploadState.VALIDATING))
    store.update(upload_id, lambda s: msgspec.structs.replace(s, state=UploadState.LOADING, kept=kept))
    return upload_id


@pytest.mark.parametrize("is_read_again", [False, True])
def test_uploads_that_left_content_without_a_version_are_counted_until_it_is_swept(
    store: UploadStore, tmp_path: Path, is_read_again: bool
) -> None:
    result = UploadResult(version=1, digest="ab" * 32, created=True)
    store.update(loading(store), lambda s: msgspec.structs.replace(s, state=UploadState.READY, result=result))
    rejected = store.update(loading(store), become(UploadState.REJECTED))
    failed = store.update(loading(store), become(UploadState.FAILED))
    crashed = loading(store)
    (recovered,) = store.recover()
    assert recovered.id == crashed
    aborted = [store.update(session.id, become(UploadState.ABORTED)) for session in (failed, recovered)]
    left = [rejected, *aborted]
    for session, settled in zip(left, (rejected, failed, recovered), strict=True):
        # Publishing, and with it storing the content, had ended by then.
        assert session.kept == KeptContent(digest="ab" * 32, at=settled.updated_at)
        assert session.unpublished_until == settled.updated_at + SWEPT_WITHIN_S
    if is_read_again:
        store = UploadStore(tmp_path / "data")
    first, last = (pick(session.unpublished_until for session in left) for pick in (min, max))
    assert {session.id for session in store.counted("acme", first - 1)} == {session.id for session in left}
    assert store.counted("acme", last) == []


def test_the_record_of_an_upload_is_kept_as_long_as_its_unpublished_content(
    store: UploadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.store.uploads.MAX_FINAL", 1)
    left = store.update(loading(store), become(UploadState.REJECTED))
    others = [store.update(create(store).id, become(UploadState.ABORTED)) for _ in range(3)]
    assert {session.id for session in store.sessions()} == {left.id, others[-1].id}
    store.expire(left.unpublished_until)
    assert [session.id for session in store.sessions()] == [others[-1].id]


def test_a_record_without_the_kept_field_is_read(store: UploadStore, tmp_path: Path) -> None:
    session = create(store)
    path = tmp_path / "data" / "uploads" / session.id / "session.json"
    record = msgspec.json.decode(path.read_bytes())
    assert record.pop("kept") is None
    path.write_bytes(msgspec.json.encode(record))
    assert store.load(session.id) == session


def test_changes_of_another_process_to_uploads_are_listed(store: UploadStore, tmp_path: Path) -> None:
    other = UploadStore(tmp_path / "data")
    ended, open_until_later = (store.update(create(store).id, become(UploadState.ABORTED)), create(store))
    for _ in range(2):  # from the disk, then from memory
        assert {session.id for session in store.sessions()} == {ended.id, open_until_later.id}
    other.remove(ended.id)
    other.update(open_until_later.id, become(UploadState.EXPIRED))
    for _ in range(2):
        assert [(session.id, session.state) for session in store.sessions()] == [
            (open_until_later.id, UploadState.EXPIRED)
        ]


def test_reports_are_read_by_load_and_not_by_listing(store: UploadStore) -> None:
    report = msgspec.Raw(b'{"checks":[]}')
    rejected, opened = (create(store, now=now) for now in (1.0, 2.0))
    store.update(rejected.id, lambda s: msgspec.structs.replace(s, state=UploadState.REJECTED, report=report))
    for _ in range(2):  # from the disk, then from memory
        assert [(session.id, session.report) for session in store.sessions()] == [
            (opened.id, NO_REPORT),
            (rejected.id, NO_REPORT),
        ]
        assert bytes(store.load(rejected.id).report) == bytes(report)


def test_only_the_newest_finished_uploads_of_a_tenant_are_kept(
    store: UploadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.store.uploads.MAX_FINAL", 3)
    foreign, still_open = (create(store, tenant="globex"), create(store))
    store.update(foreign.id, become(UploadState.ABORTED))
    opened = [create(store) for _ in range(5)]
    # In another order than they were opened.
    for ended in opened[::-1]:
        store.update(ended.id, become(UploadState.REJECTED))
    kept = {session.id for session in (foreign, still_open, *opened[:3])}
    for each in (store, UploadStore(tmp_path / "data")):
        assert {session.id for session in each.sessions()} == kept
    assert set(os.listdir(tmp_path / "data" / "uploads")) == {*kept, "trash"}


@pytest.mark.parametrize("remove", [create, lambda store: store.expire()], ids=["create", "expire"])
def test_create_and_expire_remove_excess_finished_uploads_found_on_the_disk(
    store: UploadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove: Callable[[UploadStore], object]
) -> None:
    ended = [store.update(create(store).id, become(UploadState.ABORTED)) for _ in range(5)]
    monkeypatch.setattr("loraserve.store.uploads.MAX_FINAL", 2)
    remove(UploadStore(tmp_path / "data"))
    final = [session.id for session in store.sessions() if session.state.is_final]
    assert set(final) == {session.id for session in ended[3:]}


def test_a_damaged_record_is_reported_and_the_others_are_listed(
    store: UploadStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, whole = create(store).id, create(store).id
    path = tmp_path / "data" / "uploads" / damaged / "session.json"
    path.write_bytes(b"{")
    assert [session.id for session in store.sessions()] == [whole]
    assert str(path) in caplog.text
    with pytest.raises(DamagedFileError):
        store.load(damaged)


def test_a_damaged_record_is_reported_once_until_its_file_changes(
    store: UploadStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sessions are scanned at least once a minute."""
    damaged = [create(store).id, create(store).id]
    paths = [tmp_path / "data" / "uploads" / each / "session.json" for each in damaged]
    for path in paths:
        path.write_bytes(b"{")
    for _ in range(3):
        assert [*store.sessions()] == []
    assert [record.getMessage().count("session.json") for record in caplog.records] == [1, 1]
    paths[0].write_bytes(b"[")
    os.utime(paths[0], (1.0, 1.0))
    shutil.rmtree(paths[1].parent)
    for _ in range(2):
        assert [*store.sessions()] == []
    assert [str(paths[0]) in record.getMessage() for record in caplog.records[2:]] == [True]


def test_unfinished_uploads_expire_and_lose_their_bytes(store: UploadStore, tmp_path: Path) -> None:
    late, failed, young, validating = (create(store, now=now).id for now in (0.0, 0.0, 100.0, 0.0))
    for upload_id in (failed, validating):
        fill(store, upload_id)
        store.update(upload_id, become(UploadState.VALIDATING))
    store.update(failed, become(UploadState.FAILED))
    store.append(late, CONFIG, 0, b"{")
    expired = store.expire(EXPIRE_AFTER_S + 50)
    assert {session.id for session in expired} == {late, failed}
    assert store.load(late).state is UploadState.EXPIRED
    assert upload_files(tmp_path, late) == upload_files(tmp_path, failed) == {"session.json"}
    assert store.load(young).state is UploadState.OPEN
    assert store.load(validating).state is UploadState.VALIDATING


def test_records_of_finished_uploads_are_removed_after_a_week(store: UploadStore) -> None:
    session = create(store)
    aborted = store.update(session.id, become(UploadState.ABORTED))
    store.expire(aborted.updated_at + KEEP_FINAL_S - 1)
    assert store.load(session.id).state is UploadState.ABORTED
    store.expire(aborted.updated_at + KEEP_FINAL_S + 1)
    with pytest.raises(UploadNotFoundError):
        store.load(session.id)
    store.remove(session.id)


def test_expiring_a_record_that_another_server_removed_first_is_no_error(
    store: UploadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = store.update(create(store).id, become(UploadState.ABORTED))
    flock = fcntl.flock

    def overtaken(descriptor: int, operation: int) -> None:
        """Blocks until the other server has removed the folder and released its lock."""
        monkeypatch.setattr(fcntl, "flock", flock)
        UploadStore(tmp_path / "data").remove(aborted.id)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    assert store.expire(aborted.updated_at + KEEP_FINAL_S + 1) == []
    assert os.listdir(tmp_path / "data" / "uploads") == ["trash"]
    assert os.listdir(tmp_path / "data" / "uploads" / "trash") == []


def test_everything_is_private_to_the_user(store: UploadStore, tmp_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        upload_id = create(store).id
        fill(store, upload_id)
        store.prepare(upload_id)
    finally:
        os.umask(old_umask)
    for path in (tmp_path / "data" / "uploads").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_crash_anywhere_leaves_a_readable_upload_that_can_be_finished(tmp_path: Path) -> None:
    names = iter(range(1000))
    data_dir = tmp_path

    def prepare() -> None:
        nonlocal data_dir
        data_dir = tmp_path / str(next(names))
        UploadStore(data_dir)

    def work() -> None:
        run_to_ready(UploadStore(data_dir), create(UploadStore(data_dir)).id)

    seen: list[str] = []
    for _ in crash_points(prepare, work):
        store = UploadStore(data_dir)
        store.recover()
        sessions = store.sessions()
        if sessions:
            (session,) = sessions
            seen.append(session.state)
            if not session.state.is_final:
                run_to_ready(store, session.id)
            assert store.load(session.id).state is UploadState.READY
        store.expire(10.0**10)
        store.expire(10.0**10)
        assert os.listdir(data_dir / "uploads") == ["trash"]
        assert os.listdir(data_dir / "uploads" / "trash") == []
    assert set(seen) == {UploadState.OPEN, UploadState.READY}


def run_to_ready(store: UploadStore, upload_id: str) -> None:
    with store.claim(upload_id):
        for file, content in zip(store.load(upload_id).files, (b"{  }", b"0123456789"), strict=True):
            middle = max(file.received_bytes, 2)
            store.append(upload_id, file.name, file.received_bytes, content[file.received_bytes : middle])
            store.append(upload_id, file.name, middle, content[middle:])
        store.update(upload_id, become(UploadState.VALIDATING))
        assert (store.prepare(upload_id) / WEIGHTS).read_bytes() == b"0123456789"
        store.update(upload_id, become(UploadState.LOADING))
        store.update(upload_id, become(UploadState.READY))


def test_bytes_left_by_a_crash_after_the_final_state_are_removed(store: UploadStore, tmp_path: Path) -> None:
    session = create(store)
    aborted = store.update(session.id, become(UploadState.ABORTED))
    store.part_path(session.id, WEIGHTS).write_bytes(b"0123")
    store.expire(aborted.updated_at)
    assert upload_files(tmp_path, session.id) == {"session.json"}

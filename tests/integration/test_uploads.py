"""Upload sessions on a real store with real ingest processes: states, refusals, crashes."""

import asyncio
import errno
import json
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from loraserve_adapters.limits import DEFAULT_LIMITS

from loraserve.control.adapters.versions import Published
from loraserve.control.documents.adapter_edits import Content
from loraserve.control.ingest.processes import IngestError
from loraserve.control.ingest.report import AdapterRejectedError, Report
from loraserve.control.tenancy.principal import Principal
from loraserve.control.uploads.errors import OFFSET_HEADER
from loraserve.control.uploads.service import MAX_OPEN_UPLOADS
from loraserve.control.uploads.states import report_of
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.blobs import SWEPT_WITHIN_S
from loraserve.store.errors import DamagedFileError, IncompleteBlobError, UnreadFileError
from loraserve.store.upload_session import CHUNK_BYTES, UploadFile, UploadSession, UploadState
from tests.support.fork_servers import fork_server_of
from tests.support.uploads import ALICE, BOB, MemoryPublisher, UploadBench, announced, body
from tests.unit.adapters.folders import config_of, lora_tensors, safetensors_bytes, tiny_layout
from tests.zoo.artifacts import CONFIG, WEIGHTS, files


@pytest.fixture
def bench(tmp_path: Path) -> UploadBench:
    return UploadBench(tmp_path)


async def opened(bench: UploadBench, content: dict[str, bytes], *, complete: bool = True) -> UploadSession:
    session = await bench.service.open(ALICE, "sql", announced(content))
    if complete:
        for name, data in content.items():
            await bench.service.put_chunk(ALICE, session.id, name, 0, body(data))
    return session


async def settled(bench: UploadBench, upload_id: str) -> UploadSession:
    await bench.service.commit(ALICE, "request", upload_id)
    return await bench.service.get(ALICE, upload_id, wait_s=60)


def refused(code: ErrorCode, match: str | None = None) -> pytest.RaisesExc[ServingError]:
    return pytest.RaisesExc(ServingError, match=match, check=lambda error: error.code is code)


def test_an_upload_goes_from_open_to_ready_and_is_published_once(bench: UploadBench) -> None:
    async def run() -> None:
        session = await opened(bench, files())
        assert session.state is UploadState.OPEN
        committed = await bench.service.commit(ALICE, "request", session.id)
        assert committed.state is UploadState.VALIDATING
        assert bench.publisher.documents == {}
        done = await bench.service.get(ALICE, session.id, wait_s=60)
        assert done.state is UploadState.READY
        assert done.result is not None
        assert (done.result.version, done.result.created) == (1, True)
        assert bench.smoked == bench.certified == [done.result.digest]
        report = report_of(done)
        assert report is not None
        assert report.accepted
        again = await bench.service.commit(ALICE, "request", session.id)
        assert again == done

    asyncio.run(run())
    assert len(bench.contents()) == 1
    assert not any("uploads" in path for path in bench.remains())


def test_repeated_content_is_the_same_version_and_is_stored_once(bench: UploadBench) -> None:
    first = asyncio.run(bench.send(files()))
    second = asyncio.run(bench.send(files()))
    other_tenant = asyncio.run(bench.send(files(), principal=BOB))
    assert first.result is not None
    assert second.result is not None
    assert other_tenant.result is not None
    assert (second.result.version, second.result.created) == (1, False)
    assert (other_tenant.result.version, other_tenant.result.created) == (1, True)
    assert bench.contents() == [first.result.digest]


def test_a_bad_weights_header_is_refused_before_the_rest_is_sent(bench: UploadBench) -> None:
    """Only one 8 MiB chunk of 20 MB is accepted."""
    layout = bench.layout = tiny_layout()
    wrong = safetensors_bytes(lora_tensors(layout, ["q_proj"], rank=2))
    header_size = int.from_bytes(wrong[:8], "little") + 8
    large = wrong + bytes(20_000_000)

    async def run() -> AdapterRejectedError:
        content = {**files(), WEIGHTS: large}
        session = await opened(bench, content, complete=False)
        await bench.service.put_chunk(ALICE, session.id, CONFIG, 0, body(content[CONFIG]))
        with pytest.raises(AdapterRejectedError) as error:
            await bench.service.put_chunk(ALICE, session.id, WEIGHTS, 0, body(large[: 8 << 20]))
        with pytest.raises(AdapterRejectedError) as again:
            await bench.service.put_chunk(ALICE, session.id, WEIGHTS, 8 << 20, body(b"more"))
        assert again.value.report == error.value.report
        stored = await bench.service.get(ALICE, session.id)
        assert stored.state is UploadState.REJECTED
        return error.value

    assert header_size < 8 << 20
    error = asyncio.run(run())
    assert error.code is ErrorCode.ADAPTER_REJECTED
    assert "bad_safetensors" in error.report.codes
    assert bench.remains() == []


def test_an_interrupted_upload_resumes_where_it_stopped(bench: UploadBench) -> None:
    content = files()

    async def broken(data: bytes) -> AsyncIterator[bytes]:
        yield data
        raise ConnectionResetError

    async def run() -> None:
        session = await opened(bench, content, complete=False)
        await bench.service.put_chunk(ALICE, session.id, CONFIG, 0, body(content[CONFIG]))
        await bench.service.put_chunk(ALICE, session.id, WEIGHTS, 0, body(content[WEIGHTS][:1000]))
        with pytest.raises(ConnectionResetError):
            await bench.service.put_chunk(ALICE, session.id, WEIGHTS, 1000, broken(b"lost"))
        with pytest.raises(ServingError) as wrong_start:
            await bench.service.put_chunk(ALICE, session.id, WEIGHTS, 500, body(b"x"))
        assert wrong_start.value.code is ErrorCode.UPLOAD_OFFSET
        offset = int(wrong_start.value.headers[OFFSET_HEADER])
        assert offset == 1000
        # Resumes as another server process would.
        other = UploadBench(bench.data_dir)
        end = await other.service.put_chunk(ALICE, session.id, WEIGHTS, offset, body(content[WEIGHTS][offset:]))
        assert end == len(content[WEIGHTS])
        assert (await settled(other, session.id)).state is UploadState.READY

    asyncio.run(run())


def test_an_empty_chunk_is_checked_like_any_other(bench: UploadBench) -> None:
    async def run() -> None:
        session = await opened(bench, files(), complete=False)
        await bench.service.put_chunk(ALICE, session.id, CONFIG, 0, body(b"{"))
        assert await bench.service.put_chunk(ALICE, session.id, CONFIG, 1, body(b"")) == 1
        with refused(ErrorCode.UPLOAD_OFFSET):
            await bench.service.put_chunk(ALICE, session.id, CONFIG, 0, body(b""))
        with refused(ErrorCode.INVALID_VALUE, match="is not part of upload"):
            await bench.service.put_chunk(ALICE, session.id, "other.txt", 0, body(b""))
        await bench.service.abort(ALICE, session.id)
        with refused(ErrorCode.UPLOAD_STATE):
            await bench.service.put_chunk(ALICE, session.id, CONFIG, 1, body(b""))

    asyncio.run(run())


def test_another_tenants_upload_looks_missing(bench: UploadBench) -> None:
    async def run() -> None:
        session = await opened(bench, files())
        messages = set()
        for upload_id in (session.id, "0" * 32, "../" + session.id, "x" * 1000):
            for call in (
                bench.service.get(BOB, upload_id),
                bench.service.commit(BOB, "request", upload_id),
                bench.service.abort(BOB, upload_id),
                bench.service.put_chunk(BOB, upload_id, CONFIG, 0, body(b"{}")),
            ):
                with pytest.raises(ServingError) as error:
                    await call
                assert error.value.code is ErrorCode.NOT_FOUND
                messages.add(error.value.message.replace(upload_id, "ID"))
        assert len({message for message in messages if message.endswith("'ID'.")}) == 1
        assert await bench.service.list(BOB) == []
        assert [found.id for found in await bench.service.list(ALICE)] == [session.id]

    asyncio.run(run())


def test_an_incomplete_upload_cannot_be_committed(bench: UploadBench) -> None:
    async def run() -> None:
        session = await opened(bench, files(), complete=False)
        with refused(ErrorCode.UPLOAD_STATE, "not complete"):
            await bench.service.commit(ALICE, "request", session.id)
        with refused(ErrorCode.INVALID_VALUE, "announced"):
            await bench.service.put_chunk(ALICE, session.id, CONFIG, 0, body(b" " * 10_000))
        with refused(ErrorCode.INVALID_VALUE, "not part of upload"):
            await bench.service.put_chunk(ALICE, session.id, "README.md", 0, body(b"x"))

    asyncio.run(run())


def test_aborting_during_ingest_removes_the_sent_files(bench: UploadBench) -> None:
    """The abort comes while ingest is still running."""
    bench.command = fork_server_of("import time; time.sleep(600)")

    async def run() -> None:
        session = await bench.service.open(ALICE, "sql", announced(files()))
        for name, data in files().items():
            # Straight into the store: the service would have that process check the files.
            bench.store.append(session.id, name, 0, data)
        await bench.service.commit(ALICE, "request", session.id)
        aborted = await bench.service.abort(ALICE, session.id)
        assert aborted.state is UploadState.ABORTED
        assert (await bench.service.abort(ALICE, session.id)).state is UploadState.ABORTED
        with refused(ErrorCode.UPLOAD_STATE):
            await bench.service.put_chunk(ALICE, session.id, CONFIG, 0, body(b"{}"))

    asyncio.run(run())
    assert bench.remains() == []
    assert bench.publisher.documents == {}


def test_quota_counts_uploads_in_progress(bench: UploadBench) -> None:
    content = files()
    size = sum(map(len, content.values()))

    async def run() -> None:
        await opened(bench, content)
        await opened(bench, content, complete=False)
        assert bench.quota.asked == [("alice", "sql", size, 0), ("alice", "sql", size, size)]
        bench.quota.error = ServingError(ErrorCode.INSUFFICIENT_QUOTA, "full")
        with refused(ErrorCode.INSUFFICIENT_QUOTA):
            await opened(bench, content)

    asyncio.run(run())
    assert len(bench.store.sessions()) == 2


def test_a_tenants_open_uploads_are_limited(bench: UploadBench) -> None:
    async def run() -> None:
        for _ in range(MAX_OPEN_UPLOADS):
            await opened(bench, files(), complete=False)
        with refused(ErrorCode.INSUFFICIENT_QUOTA, "64 uploads are open"):
            await opened(bench, files(), complete=False)

    asyncio.run(run())


def test_only_the_latest_refusals_are_kept_and_published_content_stays(
    bench: UploadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.store.uploads.MAX_FINAL", 2)
    config = json.dumps(config_of(use_qalora=True)).encode()

    async def run() -> None:
        published = await bench.send(files())
        for _ in range(4):
            session = await opened(bench, {**files(), CONFIG: config}, complete=False)
            with pytest.raises(AdapterRejectedError):
                await bench.service.put_chunk(ALICE, session.id, CONFIG, 0, body(config))
        listed = await bench.service.list(ALICE)
        assert [each.state for each in listed] == [UploadState.REJECTED] * 2
        assert [report_of(each) is not None for each in await bench.service.with_reports(listed)] == [True] * 2
        with refused(ErrorCode.NOT_FOUND):
            await bench.service.get(ALICE, published.id)
        assert published.result is not None
        assert bench.contents() == [published.result.digest]
        bench.store.remove(listed[0].id)
        assert [each.id for each in await bench.service.with_reports(listed)] == [listed[1].id]

    asyncio.run(run())
    assert len(bench.publisher.documents) == 1


def test_incoming_forms_count_as_open_uploads_of_their_tenant(
    bench: UploadBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.control.uploads.service.MAX_OPEN_UPLOADS", 2)
    folder = tmp_path / "form"
    folder.mkdir()
    for name, data in files().items():
        (folder / name).write_bytes(data)

    async def run() -> None:
        async with bench.service.incoming(ALICE, 10):
            await opened(bench, files(), complete=False)
            with refused(ErrorCode.INSUFFICIENT_QUOTA, "2 uploads are open"):
                await opened(bench, files(), complete=False)
            with refused(ErrorCode.INSUFFICIENT_QUOTA, "2 uploads are open"):
                await bench.service.incoming(ALICE, 10).__aenter__()
            async with bench.service.incoming(BOB, 10):
                pass
        # The form's session takes over its place among the open uploads.
        async with bench.service.incoming(ALICE, 10) as form:
            done = await bench.service.from_path(ALICE, "request", "sql", folder, roots=None, form=form)
            assert done.state is UploadState.READY
            await opened(bench, files(), complete=False)

    asyncio.run(run())


def test_incoming_forms_reserve_quota(bench: UploadBench) -> None:
    bench.quota.limit = 1000

    async def run() -> None:
        with refused(ErrorCode.INSUFFICIENT_QUOTA, "1000 bytes"):
            await bench.service.incoming(ALICE, 1001).__aenter__()
        async with bench.service.incoming(ALICE, 600) as form:
            assert form.max_bytes == 1000
            with refused(ErrorCode.INSUFFICIENT_QUOTA, "400 bytes"):
                await bench.service.incoming(ALICE, 401).__aenter__()
            # A form that does not announce its length reserves the rest.
            async with bench.service.incoming(ALICE, None) as form:
                assert form.max_bytes == 400
                for size_bytes in (0, 1, None):
                    with refused(ErrorCode.INSUFFICIENT_QUOTA, " 0 bytes"):
                        await bench.service.incoming(ALICE, size_bytes).__aenter__()
        bench.quota.limit = None
        async with bench.service.incoming(ALICE, None) as form:
            assert (form.size_bytes, form.max_bytes) == (0, None)

    asyncio.run(run())


def test_a_failed_smoke_test_rejects_or_fails_the_upload(bench: UploadBench) -> None:
    async def run() -> None:
        session = await opened(bench, files())
        bench.smoke_error = ServingError(ErrorCode.ENGINE_DEAD, "The engine is not running.")
        failed = await settled(bench, session.id)
        assert (failed.state, failed.error) == (UploadState.FAILED, "The engine is not running. Commit again.")
        assert bench.publisher.documents == {}
        bench.smoke_error = None
        assert (await settled(bench, session.id)).state is UploadState.READY
        bench.smoke_error = AdapterRejectedError(Report(checks=[]))
        changed = {**files(), CONFIG: json.dumps(config_of(lora_alpha=9)).encode()}
        assert (await settled(bench, (await opened(bench, changed)).id)).state is UploadState.REJECTED

    asyncio.run(run())


def test_unpublished_content_counts_until_it_is_swept(bench: UploadBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve.control.uploads.service.MAX_UNPUBLISHED", 2)
    monkeypatch.setattr("loraserve.store.uploads.MAX_FINAL", 1)
    size = sum(map(len, files().values()))

    async def run() -> None:
        bench.smoke_error = AdapterRejectedError(Report(checks=[]))
        rejected = await bench.send(files())
        bench.smoke_error = ServingError(ErrorCode.ENGINE_DEAD, "The engine is not running.")
        changed = {**files(), CONFIG: json.dumps(config_of(lora_alpha=9)).encode()}
        aborted = await bench.service.abort(ALICE, (await bench.send(changed)).id)
        assert [session.state for session in (rejected, aborted)] == [UploadState.REJECTED, UploadState.ABORTED]
        left = bench.quota.limit = 10 * size
        for refusal in (bench.service.incoming(ALICE, left).__aenter__(), opened(bench, files())):
            with refused(ErrorCode.INSUFFICIENT_QUOTA, "2 uploads ended without a version"):
                await refusal
        monkeypatch.setattr("loraserve.control.uploads.service.MAX_UNPUBLISHED", 3)
        async with bench.service.incoming(ALICE, 1) as form:
            assert form.max_bytes == left - rejected.size_bytes - aborted.size_bytes
        bench.smoke_error = None
        done = await bench.send(files())
        for told in (bench.quota.unpublished, bench.publisher.unpublished):
            assert {session.id for session in told} == {rejected.id, aborted.id}
            assert {session.kept.digest for session in told if session.kept} == set(bench.contents())
        # After the sweep they are like any other final upload.
        now = time.time()
        monkeypatch.setattr("time.time", lambda: now + SWEPT_WITHIN_S + 1)
        await bench.service.open(ALICE, "sql", announced(files()))
        assert bench.quota.unpublished == []
        final = [session.id for session in await bench.service.list(ALICE) if session.state.is_final]
        assert final == [done.id]

    asyncio.run(run())


def test_uploads_that_end_before_their_content_is_stored_do_not_count_as_unpublished(bench: UploadBench) -> None:
    async def run() -> None:
        await bench.service.abort(ALICE, (await opened(bench, files())).id)
        broken = {**files(), WEIGHTS: files()[WEIGHTS][:-1]}
        with pytest.raises(AdapterRejectedError):
            await bench.send(broken)
        await opened(bench, files())
        assert bench.quota.unpublished == []

    asyncio.run(run())


def test_a_failed_folder_upload_asks_for_a_retry_and_leaves_no_open_upload(bench: UploadBench, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, data in files().items():
        (folder / name).write_bytes(data)
    bench.smoke_error = ServingError(ErrorCode.SERVICE_UNAVAILABLE, "The server's Redis is not reachable.")

    async def run() -> None:
        with pytest.raises(ServingError) as raised:
            await bench.service.from_path(ALICE, "request", "sql", folder, roots=None)
        assert raised.value.message == ("The server's Redis is not reachable. No version was published. Try again.")
        assert raised.value.retry_after_s == 2
        assert [session.state for session in await bench.service.list(ALICE)] == [UploadState.ABORTED]

    asyncio.run(run())


def test_a_commit_by_a_key_revoked_meanwhile_fails_and_can_be_repeated(bench: UploadBench) -> None:
    async def run() -> None:
        session = await opened(bench, files())
        bench.publisher.refusal = ServingError(ErrorCode.INVALID_API_KEY, "The API key was revoked.")
        failed = await settled(bench, session.id)
        assert failed.state is UploadState.FAILED
        assert failed.error == (
            "The caller that committed this upload may no longer publish it, so nothing was published: "
            "The API key was revoked. Commit again."
        )
        assert bench.publisher.documents == {}
        bench.publisher.refusal = None
        assert (await settled(bench, session.id)).state is UploadState.READY

    asyncio.run(run())


def test_a_folder_upload_by_a_key_revoked_meanwhile_is_refused_as_an_invalid_key(
    bench: UploadBench, tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, data in files().items():
        (folder / name).write_bytes(data)

    @asynccontextmanager
    async def revoked_while_it_is_tried(content: Content) -> AsyncIterator[None]:
        bench.smoked.append(content.digest)
        bench.publisher.refusal = ServingError(ErrorCode.INVALID_API_KEY, "The API key was revoked.")
        yield

    bench.smoke = revoked_while_it_is_tried

    async def run() -> None:
        # The first is refused at its commit, the second before its content is stored.
        for _ in range(2):
            with refused(ErrorCode.INVALID_API_KEY, "revoked"):
                await bench.service.from_path(ALICE, "request", "sql", folder, roots=None)
            assert [session.state for session in await bench.service.list(ALICE)] == [UploadState.ABORTED]
        assert len(bench.smoked) == 1
        assert bench.publisher.documents == {}

    asyncio.run(run())


def test_only_the_first_chunk_of_a_large_folder_with_a_bad_header_is_copied(bench: UploadBench, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / CONFIG).write_bytes(files()[CONFIG])
    with open(folder / WEIGHTS, "wb") as weights:
        weights.write((1 << 40).to_bytes(8, "little"))  # the header's length
        weights.truncate(3 * CHUNK_BYTES)

    async def run() -> None:
        with pytest.raises(AdapterRejectedError) as raised:
            await bench.service.from_path(ALICE, "request", "sql", folder, roots=None)
        (listed,) = await bench.service.list(ALICE)
        (session,) = await bench.service.with_reports([listed])
        assert (session.state, report_of(session)) == (UploadState.REJECTED, raised.value.report)
        assert [file.received_bytes for file in session.files if file.name == WEIGHTS] == [CHUNK_BYTES]

    asyncio.run(run())
    assert not any("uploads" in path for path in bench.remains())


def test_an_upload_that_a_full_disk_or_a_bug_failed_can_be_committed_again(bench: UploadBench) -> None:
    async def run() -> None:
        session = await opened(bench, files())
        for error, text in [
            (OSError(28, "No space left on device"), "No space left"),
            (ZeroDivisionError(), "unexpected"),
            (IncompleteBlobError("half"), "Half"),
        ]:
            bench.publisher.error = error
            failed = await settled(bench, session.id)
            assert failed.state is UploadState.FAILED
            assert text in (failed.error or "")
        bench.publisher.error = None
        assert (await settled(bench, session.id)).state is UploadState.READY

    asyncio.run(run())


@pytest.mark.parametrize("damage", [DamagedFileError, UnreadFileError])
def test_a_damaged_document_is_named_in_the_log_and_not_to_the_client(
    bench: UploadBench, caplog: pytest.LogCaptureFixture, damage: type[DamagedFileError]
) -> None:
    path = "/var/lib/loraserve/docs/adapter/9e/00000001.json"

    async def run() -> None:
        session = await opened(bench, files())
        bench.publisher.error = damage(path, "cannot be read: Input data was truncated")
        failed = await settled(bench, session.id)
        assert failed.state is UploadState.FAILED
        assert failed.error is not None
        assert "the server's log names it" in failed.error
        assert "/var/lib" not in failed.error
        assert path in caplog.text
        bench.publisher.error = None
        assert (await settled(bench, session.id)).state is UploadState.READY

    asyncio.run(run())


def test_callers_do_not_wait_for_an_outcome_that_cannot_be_written(
    bench: UploadBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_full = False
    save = bench.store._save

    def save_if_room(session: UploadSession) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(session)

    @asynccontextmanager
    async def fill(_: Content) -> AsyncIterator[None]:
        nonlocal is_full
        is_full = True
        yield

    monkeypatch.setattr(bench.store, "_save", save_if_room)
    bench.smoke = fill
    folder = tmp_path / "source"
    folder.mkdir()
    for name, data in files().items():
        (folder / name).write_bytes(data)

    async def run() -> None:
        nonlocal is_full
        with refused(ErrorCode.SERVICE_UNAVAILABLE, "is the disk full"):
            await bench.service.from_path(ALICE, "request", "sql", folder, roots=None)
        is_full = False
        session = await opened(bench, files())
        await bench.service.commit(ALICE, "request", session.id)
        for wait_s in (60, 60, 0):
            with refused(ErrorCode.SERVICE_UNAVAILABLE, "is the disk full"):
                await bench.service.get(ALICE, session.id, wait_s)
        with bench.store.claim(session.id):  # as if another server were working on it
            assert (await bench.service.get(ALICE, session.id)).state is UploadState.LOADING
        is_full = False
        await bench.service.expire()
        assert {session.state for session in await bench.service.list(ALICE)} == {UploadState.OPEN}
        monkeypatch.setattr(bench.service._commits, "_smoke", bench._smoke)
        assert (await settled(bench, session.id)).state is UploadState.READY

    asyncio.run(asyncio.wait_for(run(), 60))


def test_announced_file_sizes_are_limited(bench: UploadBench) -> None:
    async def run() -> None:
        for name, size in ((CONFIG, DEFAULT_LIMITS.max_config_bytes + 1), (WEIGHTS, 5 << 30)):
            sizes = {CONFIG: 100, WEIGHTS: 1000, name: size}
            with refused(ErrorCode.INVALID_VALUE, str(size)):
                await bench.service.open(ALICE, "sql", [UploadFile(name=n, size_bytes=s) for n, s in sizes.items()])

    asyncio.run(run())


def test_a_malformed_sha256_is_refused_before_anything_is_sent(bench: UploadBench) -> None:
    async def run() -> None:
        for wrong in ("zz", "", "0" * 63, "0" * 65):
            files = [UploadFile(name=CONFIG, size_bytes=10, sha256=wrong), UploadFile(name=WEIGHTS, size_bytes=10)]
            with refused(ErrorCode.INVALID_VALUE, "64 hexadecimal digits"):
                await bench.service.open(ALICE, "sql", files)

    asyncio.run(run())


def die(_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead")


class DyingPublisher(MemoryPublisher):
    """Dies when the content is on disk and no document names it yet."""

    async def publish(
        self,
        principal: Principal,
        request_id: str,
        name: str,
        content: Content,
        *,
        activate: bool = True,
        unpublished: Sequence[UploadSession] = (),
    ) -> Published:
        die(content)


def server_that_dies(data_dir: Path, moment: str) -> None:
    bench = UploadBench(data_dir, smoke=die if moment == "loading" else None)
    if moment == "publishing":
        bench.publisher = DyingPublisher()

    async def run() -> None:
        session = await opened(bench, files())
        if moment == "validating":
            await bench.service.commit(ALICE, "request", session.id)
        if moment in ("open", "validating"):
            die(session)
        await settled(bench, session.id)

    asyncio.run(run())


@pytest.mark.parametrize("moment", ["open", "validating", "loading", "publishing"])
def test_a_killed_server_leaves_an_upload_that_can_be_committed_again(moment: str, tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=server_that_dies, args=(tmp_path, moment))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    bench = UploadBench(tmp_path)

    async def run() -> None:
        await bench.service.start()
        (session,) = await bench.service.list(ALICE)
        assert session.state is UploadState.OPEN
        done = await settled(bench, session.id)
        assert done.state is UploadState.READY
        assert done.result is not None
        assert bench.contents() == [done.result.digest]

    asyncio.run(run())
    assert len(bench.publisher.documents) == 1


def test_only_one_of_two_servers_works_on_a_commit(bench: UploadBench) -> None:
    other = UploadBench(bench.data_dir)

    async def run() -> None:
        session = await opened(bench, files())
        await asyncio.gather(
            bench.service.commit(ALICE, "request", session.id), other.service.commit(ALICE, "request", session.id)
        )
        await other.service.expire()
        done = await other.service.get(ALICE, session.id, wait_s=60)
        assert done.state is UploadState.READY
        await bench.service.close()
        await other.service.close()

    asyncio.run(run())
    assert len(bench.smoked) + len(other.smoked) == 1


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_commit_of_an_upload_that_another_server_ends_logs_no_fault(
    bench: UploadBench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, is_removed: bool
) -> None:
    other = UploadBench(bench.data_dir)

    async def run() -> None:
        session = await opened(bench, files())

        async def ingest(*_: object) -> NoReturn:
            if is_removed:
                other.store.remove(session.id)
            else:
                await other.service.abort(ALICE, session.id)
            raise IngestError("the files are gone")

        monkeypatch.setattr(bench.service._commits._ingest, "ingest", ingest)
        await bench.service.commit(ALICE, "request", session.id)
        if is_removed:
            with refused(ErrorCode.NOT_FOUND):
                await bench.service.get(ALICE, session.id, wait_s=60)
        else:
            assert (await bench.service.get(ALICE, session.id, wait_s=60)).state is UploadState.ABORTED
        await bench.service.close()
        assert not bench.service._commits._unwritten

    asyncio.run(run())
    assert caplog.text == ""


def test_a_commit_that_another_server_finished_meanwhile_returns_its_outcome(
    bench: UploadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This server reads the session before the other server's commit, and the file sizes after it."""
    other = UploadBench(bench.data_dir)

    async def run() -> None:
        session = await opened(bench, files())
        before = other.store.load(session.id)
        files_gone = [msgspec.structs.replace(file, received_bytes=0) for file in before.files]
        await settled(bench, session.id)
        read = [msgspec.structs.replace(before, files=files_gone)]
        load = other.store.load
        monkeypatch.setattr(other.store, "load", lambda upload_id: read.pop() if read else load(upload_id))
        assert (await other.service.commit(ALICE, "request", session.id)).state is UploadState.READY
        assert not read
        await bench.service.close()
        await other.service.close()

    asyncio.run(run())


def test_a_closing_server_leaves_commits_that_can_be_repeated(bench: UploadBench) -> None:
    async def run() -> None:
        session = await opened(bench, files())
        await bench.service.commit(ALICE, "request", session.id)
        await bench.service.close()
        assert (await bench.service.get(ALICE, session.id)).state is UploadState.VALIDATING
        await bench.service.start()
        assert (await bench.service.get(ALICE, session.id)).state is UploadState.OPEN
        assert (await settled(bench, session.id)).state is UploadState.READY

    asyncio.run(run())


def test_unfinished_uploads_expire(bench: UploadBench) -> None:
    async def run() -> None:
        session = await opened(bench, files())
        bench.store.update(session.id, lambda old: msgspec.structs.replace(old, expires_at=1.0))
        await bench.service.expire()
        assert (await bench.service.get(ALICE, session.id)).state is UploadState.EXPIRED
        with refused(ErrorCode.UPLOAD_STATE):
            await bench.service.put_chunk(ALICE, session.id, CONFIG, 0, body(b"{}"))

    asyncio.run(run())
    assert bench.remains() == []

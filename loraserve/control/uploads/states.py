"""State changes of an upload's record, and what the record says about the content."""

import asyncio
import time

import msgspec

from loraserve.control.ingest.report import AdapterRejectedError, Report
from loraserve.store.errors import UploadStateError
from loraserve.store.upload_session import KeptContent, UploadResult, UploadSession, UploadState
from loraserve.store.uploads import UploadStore


async def to_state(
    store: UploadStore,
    upload_id: str,
    state: UploadState,
    *,
    report: Report | None = None,
    result: UploadResult | None = None,
    error: str | None = None,
    keeps: str | None = None,
) -> UploadSession:
    """report: None = unchanged. keeps: the digest of the content that is put on disk next.

    Raises `StoreError`, also if that state cannot follow the present one, and `OSError`.
    """

    def change(session: UploadSession) -> UploadSession:
        return msgspec.structs.replace(
            session,
            state=state,
            report=session.report if report is None else msgspec.Raw(msgspec.json.encode(report)),
            result=result,
            error=error,
            kept=session.kept if keeps is None else KeptContent(digest=keeps, at=time.time()),
        )

    return await asyncio.to_thread(store.update, upload_id, change)


def aborted(session: UploadSession) -> UploadSession:
    """NOTE: a session that has begun loading in between may have a document already, so it must stay as it is."""
    if session.state is UploadState.LOADING:
        raise UploadStateError(session.id, session.state, "be aborted while it is being published")
    return msgspec.structs.replace(session, state=UploadState.ABORTED)


def report_of(session: UploadSession) -> Report | None:
    """What was checked so far, if anything."""
    return msgspec.json.decode(session.report, type=Report | None)


def rejection_of(session: UploadSession) -> AdapterRejectedError:
    return AdapterRejectedError(report_of(session) or Report(checks=[]))

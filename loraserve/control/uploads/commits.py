"""Commits a complete upload: validates it, keeps its content, tries it on the live engine, names it in a document.

Content is on disk before any document names it, so a crash at any point leaves a session whose commit can be repeated.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Protocol

from loraserve.control.adapters.versions import Published
from loraserve.control.documents.adapter_edits import Content
from loraserve.control.ingest.manifest import Manifest
from loraserve.control.ingest.processes import Ingest, IngestError
from loraserve.control.ingest.report import AdapterRejectedError, Report
from loraserve.control.tenancy.principal import Principal
from loraserve.control.uploads.errors import sentence
from loraserve.control.uploads.states import to_state
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.blobs import BlobStore
from loraserve.store.errors import DamagedFileError, StoreError, UploadNotFoundError, UploadStateError
from loraserve.store.upload_session import UploadResult, UploadSession, UploadState
from loraserve.store.uploads import UploadStore

COMMIT_AGAIN = " Commit again."
"""Ends the error of a failed session, for clients that have its id."""

REFUSALS = (ErrorCode.INVALID_API_KEY, ErrorCode.FORBIDDEN, ErrorCode.TENANT_SUSPENDED)
"""What `Publisher.publish` raises because of the caller, not because of the content."""

_logger = logging.getLogger(__name__)


class Publisher(Protocol):
    """See `VersionService`."""

    def check_name(self, name: str) -> None: ...

    async def check_may_publish(self, principal: Principal, name: str) -> None: ...

    async def publish(
        self,
        principal: Principal,
        request_id: str,
        name: str,
        content: Content,
        *,
        activate: bool = True,
        unpublished: Sequence[UploadSession] = (),
    ) -> Published: ...


Smoke = Callable[[Content], AbstractAsyncContextManager[None]]
"""Sends the live engine a request with the content, which stays loaded until this is left. See `SmokeTest`."""
Certify = Callable[[str], None]
"""Queues the parity certificate of a digest; never raises."""


class UploadCommits:
    """The commits that this process works on. Called on the event loop."""

    def __init__(
        self,
        store: UploadStore,
        blobs: BlobStore,
        ingest: Ingest,
        *,
        publisher: Publisher,
        smoke: Smoke,
        certify: Certify,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._ingest = ingest
        self._publisher = publisher
        self._smoke = smoke
        self._certify = certify
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unwritten: set[str] = set()
        """Uploads whose outcome could not be written: their records still say that they are being committed."""

    def begin(self, claim: ExitStack, principal: Principal, request_id: str, session: UploadSession) -> None:
        """claim: on the session, which is validating; released at the end."""
        self._unwritten.discard(session.id)
        task = asyncio.create_task(self._finish(claim, principal, request_id, session))
        self._tasks[session.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(session.id, None))

    def is_running(self, upload_id: str) -> bool:
        return upload_id in self._tasks

    def has_lost_outcome(self, upload_id: str) -> bool:
        """For a session in commit by its record: whether that ended here, unwritten, and no process works on it."""
        if upload_id not in self._unwritten:
            return False
        with self._store.claim(upload_id) as is_free:
            return is_free

    async def wait(self, upload_id: str, timeout_s: float) -> None:
        """Returns when the commit has ended, or after that time."""
        if (task := self._tasks.get(upload_id)) is not None:
            await asyncio.wait({task}, timeout=timeout_s)

    async def cancel(self, upload_id: str) -> None:
        """Returns when the commit has ended. Its session stays in the state that it was in."""
        if (task := self._tasks.get(upload_id)) is not None:
            task.cancel()
            await asyncio.wait({task})

    async def close(self) -> None:
        """Stops all commits; their sessions can be committed again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _finish(self, claim: ExitStack, principal: Principal, request_id: str, session: UploadSession) -> None:
        """The session ends in a settled state unless this is cancelled or the store cannot write it."""
        with claim:
            try:
                await self._validate_and_publish(principal, request_id, session)
            except AdapterRejectedError as error:
                await self._settle(session.id, UploadState.REJECTED, report=error.report)
            except DamagedFileError as error:
                # NOTE: the message names files of the server; clients read only that there is one.
                _logger.error("upload %s failed: %s", session.id, error)
                reason = "A file in the server's data directory cannot be read; the server's log names it."
                await self._settle(session.id, UploadState.FAILED, error=f"{reason}{COMMIT_AGAIN}")
            except (ServingError, IngestError, StoreError) as error:
                reason = sentence(str(error))
                if isinstance(error, ServingError) and error.code in REFUSALS:
                    reason = (
                        "The caller that committed this upload may no longer publish it, so nothing was published: "
                        f"{reason}"
                    )
                await self._settle(session.id, UploadState.FAILED, error=f"{reason}{COMMIT_AGAIN}")
            except OSError as error:
                _logger.exception("upload %s failed", session.id)
                reason = f"the data directory cannot be written ({error.strerror})"
                await self._settle(session.id, UploadState.FAILED, error=f"{sentence(reason)}{COMMIT_AGAIN}")
            except Exception:
                _logger.exception("upload %s failed", session.id)
                reason = "An unexpected error occurred; see the server's log."
                await self._settle(session.id, UploadState.FAILED, error=f"{reason}{COMMIT_AGAIN}")

    async def _validate_and_publish(self, principal: Principal, request_id: str, session: UploadSession) -> None:
        folder = await asyncio.to_thread(self._store.prepare, session.id)
        announced = {file.name: file.sha256 for file in session.files if file.sha256 is not None}
        answer = await self._ingest.ingest(folder, announced)
        manifest = answer.manifest
        if manifest is None or not answer.report.accepted:
            raise AdapterRejectedError(answer.report)
        await to_state(self._store, session.id, UploadState.LOADING, report=answer.report, keeps=manifest.digest)
        await asyncio.to_thread(self._keep, folder, manifest)
        content = Content(
            digest=manifest.digest,
            upload_id=session.id,
            size_bytes=session.size_bytes,
            max_rank=manifest.max_lora_rank,
            targets=manifest.target_modules,
            invocation_token_ids=manifest.invocation_token_ids,
            classifier=manifest.classifier,
            chat_template=manifest.chat_template,
            trained_token_ids=manifest.trained_token_ids,
            own_tables=manifest.own_tables,
            use_dora=manifest.use_dora,
            use_rslora=manifest.use_rslora,
        )
        async with self._smoke(content):
            published = await self._publisher.publish(
                principal,
                request_id,
                session.name,
                content,
                activate=session.activate,
                unpublished=await asyncio.to_thread(self._unpublished, session.tenant),
            )
        result = UploadResult(version=published.version.n, digest=manifest.digest, created=published.created)
        await to_state(self._store, session.id, UploadState.READY, result=result)
        self._certify(manifest.digest)

    def _keep(self, folder: Path, manifest: Manifest) -> None:
        self._ingest.keep_packed(folder, manifest)
        self._blobs.publish(folder, manifest.digest)

    def _unpublished(self, tenant: str) -> list[UploadSession]:
        return [session for session in self._store.counted(tenant) if session.state.is_final]

    async def _settle(
        self, upload_id: str, state: UploadState, *, report: Report | None = None, error: str | None = None
    ) -> None:
        try:
            await to_state(self._store, upload_id, state, report=report, error=error)
        except (UploadNotFoundError, UploadStateError) as ended:
            # Another server aborted it, or removed it with its tenant: that is its outcome.
            _logger.info("upload %s did not become %s: %s", upload_id, state, ended)
        except (StoreError, OSError):
            _logger.exception("upload %s could not become %s", upload_id, state)
            self._unwritten.add(upload_id)

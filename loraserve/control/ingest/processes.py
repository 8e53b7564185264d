"""Runs the processes that read tenants' files: a few at a time, bounded in time, and harmless when they die.

Each job has its own process, so that whatever an adapter's bytes do to a process ends with it.
"""

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import Signals

import msgspec
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.limits import AdapterLimits
from loraserve_adapters.pack import largest_selectors_bytes
from loraserve_adapters.packed_file import packed_file_name
from loraserve_adapters.rules import DEFAULT_RULES, AdapterRules
from loraserve_adapters.sync_file import sync_folder

from loraserve.control.ingest.forked_jobs import ForkedJobs, ForkServerError
from loraserve.control.ingest.job import (
    OUTPUT_NAMES,
    PACKED_NAME,
    IngestJob,
    Job,
    JobAnswer,
    JudgeJob,
    ResourceLimits,
)
from loraserve.control.ingest.manifest import Manifest
from loraserve.control.ingest.report import Report
from loraserve.engine.cpu_budget import available_cpus
from loraserve.serving.process.our_modules import module_command, python_environment
from loraserve.store.blobs import CONFIG_FILE, MANIFEST_FILE
from loraserve.store.durable import data_folder

ADDRESS_SPACE_BYTES = 1 << 30
"""Several times what numpy maps. Measured: 49 MiB resident at most for 2 GiB of float32, 33 MiB for 64 KiB."""
BASE_CPU_S = 20
BYTES_PER_CPU_S = 20_000_000
"""Measured: 2 GiB of float32 for a bfloat16 base in 15 s on a shared core, so 140 MB/s. Much slower is a fault."""
MAX_ANSWER_BYTES = 64 << 20
MAX_ERROR_BYTES = 8192
PASSED_ENVIRONMENT = ("PATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "TMPDIR")

_logger = logging.getLogger(__name__)


class IngestError(Exception):
    """The process died or ran out of time, so the adapter is neither accepted nor refused; the message says why."""


class DamagedFilesError(IngestError):
    """Kept files are not what was accepted: they must be uploaded again."""

    def __init__(self, digest: str, reason: str) -> None:
        super().__init__(f"the files of adapter {digest[:12]} are damaged: {reason}")


class DoesNotFitError(IngestError):
    """Content that was accepted once is refused now, because it was made for another base model."""

    def __init__(self, digest: str, reason: str) -> None:
        super().__init__(f"adapter {digest[:12]} does not fit the served base model: {reason}")
        self.reason = reason


class Ingest:
    """Called on the event loop; jobs above `num_processes` wait for their turn."""

    def __init__(
        self,
        *,
        packed_dir: Path,
        layout: Callable[[], BaseLayout],
        rules: AdapterRules = DEFAULT_RULES,
        num_processes: int | None = None,
        timeout_s: float = 900.0,
        command: Sequence[str] = module_command("loraserve.control.ingest.child"),
    ) -> None:
        """layout: the engine's, once it is ready. num_processes: None = one for each core that this process may use."""
        self._packed_dir = packed_dir
        self._layout = layout
        self._rules = rules
        self._turns = asyncio.Semaphore(num_processes or available_cpus())
        self._timeout_s = timeout_s
        self._jobs = ForkedJobs(
            command, _environment(), max_answer_bytes=MAX_ANSWER_BYTES, max_error_bytes=MAX_ERROR_BYTES
        )

    async def close(self) -> None:
        """Ends jobs that still run."""
        await self._jobs.wait_closed()

    async def judge(self, config: Path, weights: Path, weights_size: int) -> Report:
        """From the config and as much of the weights as contains their header. Raises `IngestError`."""
        job = JudgeJob(
            config_path=str(config),
            weights_path=str(weights),
            weights_size=weights_size,
            layout=self._layout(),
            rules=self._rules,
            resources=_resources(0, self._layout(), self._rules.limits),
        )
        return (await self._run(job)).report

    async def ingest(self, folder: Path, sha256: Mapping[str, str]) -> JobAnswer:
        """Checks the two files in `folder`; if accepted, it then contains a blob and `PACKED_NAME`.

        sha256: announced hashes in hex, by file name. Raises `IngestError`; `OSError` if the disk is full.
        """
        try:
            return await self._run(self._ingest_job(folder, folder, sha256, self._rules, write_content=True))
        except (IngestError, OSError):
            # NOTE: on a full disk there is otherwise no room for the upload's outcome.
            await asyncio.to_thread(_remove_outputs, folder)
            raise

    def keep_packed(self, folder: Path, manifest: Manifest) -> Path:
        """Moves the packed form out of an ingested folder to where the engine maps it from; blocks on the disk."""
        target = self._packed_dir / manifest.packed_file
        os.replace(folder / PACKED_NAME, target)
        sync_folder(self._packed_dir)
        return target

    def packed_path(self, digest: str) -> Path:
        """Where the packed form for the served base is, or would be."""
        return self._packed_dir / packed_file_name(digest, self._layout())

    async def pack(self, digest: str, blob: Path) -> Path:
        """Makes the packed form of a blob again, for a new base or a lost file.

        Raises `IngestError`: namely `DoesNotFitError` if the content is not for the served base model, and
        `DamagedFilesError`. Raises `OSError` if the disk is full.
        """
        output = await asyncio.to_thread(self._new_output_folder, digest)
        try:
            job = self._ingest_job(blob, output, {}, self._rules_of_kept(blob), write_content=False)
            answer = await self._run(job)
            if answer.manifest is None:
                if await asyncio.to_thread(self._was_accepted_before, blob):
                    raise DamagedFilesError(digest, answer.report.summary)
                raise DoesNotFitError(digest, answer.report.summary)
            if answer.manifest.digest != digest:
                raise DamagedFilesError(digest, f"their digest is {answer.manifest.digest[:12]}")
            return await asyncio.to_thread(self.keep_packed, output, answer.manifest)
        finally:
            await asyncio.to_thread(_remove_output_folder, output)

    def _ingest_job(
        self, folder: Path, output: Path, sha256: Mapping[str, str], rules: AdapterRules, *, write_content: bool
    ) -> IngestJob:
        weights_size = sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())
        return IngestJob(
            folder=str(folder),
            output_folder=str(output),
            write_content=write_content,
            sha256=dict(sha256),
            layout=self._layout(),
            rules=rules,
            resources=_resources(weights_size, self._layout(), rules.limits),
        )

    def _rules_of_kept(self, blob: Path) -> AdapterRules:
        """What was accepted once stays so, whichever chat templates there are now. Its config was rewritten, one line
        per value, and may be longer than the accepted one."""
        config = blob / CONFIG_FILE
        size_bytes = config.stat().st_size if config.is_file() else 0
        limits = self._rules.limits
        limits = replace(limits, max_config_bytes=max(limits.max_config_bytes, size_bytes))
        return replace(self._rules, limits=limits, chat_templates=None)

    def _was_accepted_before(self, blob: Path) -> bool:
        """Whether it was accepted for the base model that is served now. Assumed if its manifest is damaged."""
        try:
            manifest = msgspec.json.decode((blob / MANIFEST_FILE).read_bytes(), type=Manifest)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return True
        return manifest.base_fingerprint == self._layout().fingerprint

    def _new_output_folder(self, digest: str) -> Path:
        """A unique folder: several processes may pack the same blob, and the last one's rename wins."""
        return Path(tempfile.mkdtemp(prefix=f".{digest[:12]}-", dir=self._packed_dir))

    async def _run(self, job: Job) -> JobAnswer:
        async with self._turns:
            try:
                async with asyncio.timeout(self._timeout_s):
                    ended = await self._jobs.run(msgspec.json.encode(job))
            except TimeoutError:
                raise IngestError(f"reading the adapter took longer than {self._timeout_s:g} s") from None
            except ForkServerError as error:
                _logger.error("the process that reads adapters is not available: %s", error)
                raise IngestError(
                    "the process that reads adapters is not available; the server's log says more"
                ) from None
        if ended.returncode != 0:
            errors = ended.errors.decode(errors="backslashreplace")
            _logger.error("the process that reads adapters failed (%s): %s", ended.returncode, errors)
            raise IngestError(f"the process that reads the adapter {_ending(ended.returncode)}")
        try:
            answer = msgspec.json.decode(ended.answer, type=JobAnswer)
        except msgspec.DecodeError as error:
            raise IngestError(f"the process that reads the adapter gave no answer: {error}") from None
        if answer.write_errno is not None:
            raise OSError(answer.write_errno, os.strerror(answer.write_errno))
        return answer


def _resources(weights_size: int, layout: BaseLayout, limits: AdapterLimits) -> ResourceLimits:
    return ResourceLimits(
        cpu_s=BASE_CPU_S + weights_size // BYTES_PER_CPU_S,
        address_space_bytes=ADDRESS_SPACE_BYTES,
        # 16-bit tensors double for a float32 base. B of experts' gate and up doubles once more, because each has zeros
        # in place of the other's outputs. Alignment takes a little.
        # The selectors of trained tokens are not in the weights; they are mostly a hole in the file.
        file_size_bytes=4 * weights_size + (64 << 20) + largest_selectors_bytes(layout, limits),
    )


def _environment() -> dict[str, str]:
    """None of the server's secrets, and no threads of numeric libraries."""
    passed = {name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ}
    return passed | python_environment() | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _ending(returncode: int) -> str:
    if returncode < 0:
        name = Signals(-returncode).name
        reason = " (it used more CPU time than allowed)" if name == "SIGXCPU" else ""
        return f"was ended by {name}{reason}"
    return f"ended with exit code {returncode}; the server's log says more"


def _remove_outputs(folder: Path) -> None:
    for name in OUTPUT_NAMES:
        (folder / name).unlink(missing_ok=True)


def _remove_output_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def packed_folder(data_dir: Path) -> Path:
    """Where packed forms are kept; created if missing."""
    return data_folder(data_dir, "packed")

"""Reads one tenant's adapter: a job on stdin, its answer on stdout.

`python -m loraserve.control.ingest.child` is the fork server, which forks a child for each job.

Before a child looks at a byte of the tenant's, it has opened every file it will need and given up the right to open
more, and its CPU time, memory (not on macOS) and file sizes are bounded. It may die at any point: nothing it wrote
counts before the parent moves it.
"""

import errno
import hashlib
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec
from loraserve_adapters.checks import Checks
from loraserve_adapters.clean_files import clean_config, has_clean_weights, write_clean_weights
from loraserve_adapters.config import CONFIG_NAME
from loraserve_adapters.content import read_content
from loraserve_adapters.digest import HashedTensor, adapter_digest, canonical_config
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.files import open_regular, read_exactly
from loraserve_adapters.judge import JudgedAdapter, judge
from loraserve_adapters.limits import AdapterLimits
from loraserve_adapters.pack import PackedAdapterWriter
from loraserve_adapters.packed_file import packed_file_name
from loraserve_adapters.safetensors_file import (
    WEIGHTS_NAME,
    SafetensorsFile,
    open_weights_descriptor,
    parse_header,
    read_first_bytes,
)
from loraserve_adapters.source import summarise
from loraserve_adapters.sync_file import sync_file

from loraserve.control.ingest.fork_server import serve
from loraserve.control.ingest.job import (
    NEW_CONFIG_NAME,
    NEW_WEIGHTS_NAME,
    PACKED_NAME,
    IngestJob,
    Job,
    JobAnswer,
    JudgeJob,
    ResourceLimits,
)
from loraserve.control.ingest.manifest import Manifest, ModuleRecord, TensorRecord
from loraserve.control.ingest.report import Report
from loraserve.serving.process.parent_death import die_with_parent
from loraserve.store.blobs import MANIFEST_FILE
from loraserve.store.durable import write_all

NICENESS = 10
CPU_GRACE_S = 5
"""Between the signal that turns pattern matching into a refusal and the one that ends the process."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
OF_THE_FILES = frozenset({"files.sha256", "config.options", "config.class", "config.base_model", "weights.unused"})
"""Checks that may differ between equal contents: they depend on how the files were written, on what the author called
the base model and its class, and on what else the files contain."""


def main() -> int:
    die_with_parent()
    os.nice(NICENESS)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        answer = _judge(job) if isinstance(job, JudgeJob) else _ingest(job)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        answer = JobAnswer(report=Report(checks=[]), write_errno=error.errno)
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    sys.stdout.buffer.flush()
    return 0


def _judge(job: JudgeJob) -> JobAnswer:
    checks, limits = Checks(), job.rules.limits
    with ExitStack() as stack:
        config_path, weights_path = Path(job.config_path), Path(job.weights_path)
        config = stack.enter_context(open_regular(config_path.parent, config_path.name, limits))
        weights, num_received = stack.enter_context(open_regular(weights_path.parent, weights_path.name, limits))
        _give_up_rights(job.resources)
        with _cpu_limit_refuses(checks):
            first_bytes = checks.attempt(
                "weights.header",
                lambda: read_first_bytes(weights, job.weights_size, limits, num_available=num_received),
            )
            if first_bytes is not None:
                judge(
                    _read_all(*config, limits),
                    first_bytes,
                    job.weights_size,
                    job.layout,
                    checks,
                    job.rules,
                )
    return JobAnswer(report=Report(checks=checks.listed()))


@dataclass(frozen=True, slots=True)
class _Files:
    """All descriptors of an ingest."""

    config: tuple[int, int]
    weights: tuple[int, int]
    """(descriptor, size)"""
    packed: int
    clean_config: int | None
    clean_weights: int | None
    manifest: int | None


def _ingest(job: IngestJob) -> JobAnswer:
    checks = Checks()
    folder, output = Path(job.folder), Path(job.output_folder)
    with ExitStack() as stack:
        try:
            files = _Files(
                config=stack.enter_context(open_regular(folder, CONFIG_NAME, job.rules.limits)),
                weights=stack.enter_context(open_weights_descriptor(folder, job.rules.limits)),
                packed=_create(output / PACKED_NAME),
                clean_config=_create(output / NEW_CONFIG_NAME) if job.write_content else None,
                clean_weights=_create(output / NEW_WEIGHTS_NAME) if job.write_content else None,
                manifest=_create(output / MANIFEST_FILE) if job.write_content else None,
            )
        except AdapterError as error:
            checks.fail("files", error)
            return JobAnswer(report=Report(checks=checks.listed()))
        _give_up_rights(job.resources)
        manifest = _verify_and_write(job, files, checks)
    # Only now, so that the uploaded files linked into the folder stay intact until everything else is written.
    if manifest is not None and job.write_content:
        os.replace(output / NEW_CONFIG_NAME, output / CONFIG_NAME)
        if os.path.getsize(output / NEW_WEIGHTS_NAME):
            os.replace(output / NEW_WEIGHTS_NAME, output / WEIGHTS_NAME)
        else:
            os.unlink(output / NEW_WEIGHTS_NAME)
    return JobAnswer(report=Report(checks=checks.listed()), manifest=manifest)


def _verify_and_write(job: IngestJob, files: _Files, checks: Checks) -> Manifest | None:
    """None if the adapter is refused."""
    descriptor, size = files.weights
    for name, (file, file_size) in ((CONFIG_NAME, files.config), (WEIGHTS_NAME, files.weights)):
        if name in job.sha256:
            _compare_sha256(name, file, file_size, job.sha256[name], checks)
    first_bytes = checks.attempt("weights.header", lambda: read_first_bytes(descriptor, size, job.rules.limits))
    if first_bytes is None:
        return None
    with _cpu_limit_refuses(checks):
        adapter = judge(
            _read_all(*files.config, job.rules.limits),
            first_bytes,
            size,
            job.layout,
            checks,
            job.rules,
        )
    if adapter is None or checks.has_failed:
        return None
    weights = SafetensorsFile(descriptor, parse_header(first_bytes, size, job.rules.limits))
    writer = PackedAdapterWriter(files.packed, adapter, job.layout)
    hashed = read_content(adapter, weights, job.layout, checks, sink=writer)
    if checks.has_failed:
        return None
    digest = adapter_digest(adapter.config, hashed)
    writer.finish(digest)
    checks.passed("digest", f"the content is {digest}", found=digest)
    manifest = _manifest(job, adapter, hashed, digest, writer.size_bytes, checks)
    if files.manifest is not None and files.clean_config is not None and files.clean_weights is not None:
        _write_synced(files.manifest, msgspec.json.encode(_content_only(manifest)))
        _write_synced(files.clean_config, clean_config(adapter.config, is_headless=adapter.is_headless))
        tensors = [tensor.entry for tensor in hashed]
        if not has_clean_weights(first_bytes, tensors):
            write_clean_weights(descriptor, files.clean_weights, tensors)
            sync_file(files.clean_weights)
    return manifest


def _manifest(
    job: IngestJob, adapter: JudgedAdapter, hashed: list[HashedTensor], digest: str, packed_bytes: int, checks: Checks
) -> Manifest:
    summary = summarise(adapter)
    return Manifest(
        digest=digest,
        config=msgspec.Raw(canonical_config(adapter.config)),
        tensors=[
            TensorRecord(
                name=tensor.entry.name,
                dtype=tensor.entry.dtype,
                shape=list(tensor.entry.shape),
                sha256=tensor.sha256.hex(),
            )
            for tensor in sorted(hashed, key=lambda tensor: tensor.entry.name)
        ],
        modules=[
            ModuleRecord(
                name=module.target.module.name, lora_rank=module.target.lora_rank, scaling=module.target.scaling
            )
            for module in adapter.modules
        ],
        base_fingerprint=job.layout.fingerprint,
        base_dtype=job.layout.dtype,
        lora_ranks=list(summary.lora_ranks),
        lora_alpha=adapter.config.lora_alpha,
        use_rslora=adapter.config.use_rslora,
        target_modules=sorted(summary.target_modules),
        dtypes=list(summary.dtypes),
        num_parameters=summary.num_parameters,
        num_labels=summary.num_labels,
        own_tables=[own.table.module.name for own in adapter.own_tables],
        packed_file=packed_file_name(digest, job.layout),
        packed_bytes=packed_bytes,
        report=Report(checks=checks.listed()),
    )


def _content_only(manifest: Manifest) -> Manifest:
    """As stored with content that several tenants may share: the same whoever uploaded it first."""
    checks = [check for check in manifest.report.checks if check.name not in OF_THE_FILES]
    return msgspec.structs.replace(manifest, report=Report(checks=checks))


def _compare_sha256(name: str, descriptor: int, size: int, announced: str, checks: Checks) -> None:
    digest = hashlib.sha256()
    position = 0
    while block := os.pread(descriptor, 4 * 1024 * 1024, position):
        digest.update(block)
        position += len(block)
    if digest.hexdigest() == announced.lower():
        checks.passed("files.sha256", f"{name} matches the announced sha256", found=announced)
        return
    found = f"{digest.hexdigest()} over {size} bytes"
    message = f"{name}: its sha256 is {digest.hexdigest()}, but {announced} was announced"
    checks.fail("files.sha256", AdapterError("sha256_mismatch", message, file=name, found=found, expected=announced))


def _read_all(descriptor: int, size: int, limits: AdapterLimits) -> bytes:
    """At most one byte more than allowed: enough to be refused for its size."""
    data = bytearray(min(size, limits.max_config_bytes + 1))
    read_exactly(descriptor, memoryview(data), 0, CONFIG_NAME)
    return bytes(data)


def _create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _write_synced(descriptor: int, data: bytes) -> None:
    write_all(descriptor, data)
    sync_file(descriptor)


def _give_up_rights(limits: ResourceLimits) -> None:
    """On macOS, where the limit on address space may not be below its present size, memory stays unbounded."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + CPU_GRACE_S))
    if sys.platform != "darwin":
        resource.setrlimit(resource.RLIMIT_AS, (limits.address_space_bytes, limits.address_space_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_size_bytes, limits.file_size_bytes))
    # No more threads, processes or descriptors than there are now.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


@contextmanager
def _cpu_limit_refuses(checks: Checks) -> Iterator[None]:
    """While patterns are matched and names compared, running out of CPU time is the adapter's fault.

    The matcher has its own budget, so this is the second line of defense.
    """

    def refuse(number: int, frame: FrameType | None) -> NoReturn:
        raise AdapterError(
            "pattern_too_complex",
            f"{CONFIG_NAME}: target_modules, rank_pattern and alpha_pattern take too long to match",
            file=CONFIG_NAME,
            key="target_modules",
        )

    before = signal.signal(signal.SIGXCPU, refuse)
    try:
        yield
    except AdapterError as error:
        checks.fail("config.targets", error)
    finally:
        signal.signal(signal.SIGXCPU, before)


if __name__ == "__main__":
    serve(main)

"""The process that reads tenants' files: what it may use, and what is left when it dies."""

import asyncio
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.limits import DEFAULT_LIMITS
from loraserve_adapters.pack import plan_payload
from loraserve_adapters.packed_file import layout_fingerprint, read_packed
from loraserve_adapters.rules import DEFAULT_RULES
from loraserve_adapters.source import read_adapter
from safetensors.numpy import load_file

from loraserve.control.ingest.job import PACKED_NAME, IngestJob, JobAnswer, ResourceLimits
from loraserve.control.ingest.processes import DoesNotFitError, Ingest, IngestError, _resources, packed_folder
from loraserve.control.uploads.states import report_of
from loraserve.store.blobs import MANIFEST_FILE
from loraserve.store.upload_session import UploadState
from tests.support.fork_servers import children_of, fork_server_of, our_fork_servers
from tests.support.uploads import ALICE, UploadBench, announced, body
from tests.unit.adapters.folders import (
    HIDDEN,
    config_of,
    lora_key,
    raw_tensor,
    safetensors_bytes,
    tiny_layout,
    with_embedding,
    with_magnitudes,
)
from tests.zoo.artifacts import CONFIG, WEIGHTS, as_headless, files, good_tensors

CHILD = (sys.executable, "-c", "import sys; from loraserve.control.ingest.child import main; sys.exit(main())")
"""Runs one job without the fork server."""
MIB = 1 << 20


def wide_layout(features: int) -> BaseLayout:
    groups = ((BaseModule("model.layers.0.mlp.up_proj", features, features),),)
    return BaseLayout(layout_fingerprint(groups, "bfloat16"), "bfloat16", groups, ("model",))


def write_sparse_adapter(folder: Path, features: int, rank: int) -> int:
    """A float32 adapter of 2 * rank * features values, nearly all of them holes on disk; returns their bytes."""
    folder.mkdir()
    size = rank * features * 4
    header = {
        lora_key("model.layers.0.mlp.up_proj", "A"): {
            "dtype": "F32",
            "shape": [rank, features],
            "data_offsets": [0, size],
        },
        lora_key("model.layers.0.mlp.up_proj", "B"): {
            "dtype": "F32",
            "shape": [features, rank],
            "data_offsets": [size, 2 * size],
        },
    }
    text = json.dumps(header).encode()
    with open(folder / WEIGHTS, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * size)
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(1.5).tobytes())
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "target_modules": ["up_proj"]}))
    return 2 * size


def digest_kept(bench: UploadBench, digest: str) -> str:
    """The digest of the content stored under that name, read again."""
    folder = bench.blobs.folder(digest)
    assert folder is not None
    return read_adapter(folder, bench.layout).digest


MEASURED_CHILD = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""
"""Starts the child from a small process: the kernel counts its starter's memory before `exec` as the child's."""


def run_child(job: IngestJob) -> tuple[JobAnswer, int]:
    """The answer and the peak resident set in bytes, of the child alone."""
    command = [sys.executable, "-c", MEASURED_CHILD, *CHILD]
    done = subprocess.run(command, input=msgspec.json.encode(job), capture_output=True, check=True)
    return msgspec.json.decode(done.stdout, type=JobAnswer), int(done.stderr) * 1024


def job_for(folder: Path, layout: BaseLayout, size: int, **resources: int) -> IngestJob:
    limits = {"cpu_s": 120, "address_space_bytes": 1 << 30, "file_size_bytes": 2 * size + 64 * MIB} | resources
    return IngestJob(
        folder=str(folder),
        output_folder=str(folder),
        write_content=True,
        sha256={},
        layout=layout,
        rules=DEFAULT_RULES,
        resources=ResourceLimits(**limits),
    )


def test_the_file_size_limit_admits_the_packed_file_that_grows_most() -> None:
    """16-bit tensors of expert linears for a float32 base: B of the fused gate and up is half zeros."""
    up = BaseModule("mlp.experts.gate_up_proj", 64, 2 * 65_536, None, 8, ("gate_proj", "up_proj"))
    source_bytes = 2 * 8 * (2 * 16 * 64 + 2 * 65_536 * 16)
    packed_bytes = plan_payload([(up,)], [32], "float32").size_bytes
    assert packed_bytes > 3.9 * source_bytes
    assert packed_bytes < _resources(source_bytes, tiny_layout(), DEFAULT_LIMITS).file_size_bytes - 64 * MIB


def test_the_file_size_limit_admits_the_packed_file_of_all_trained_tokens_of_large_tables() -> None:
    num_rows, hidden_size, num_tokens = 200_000, 64, DEFAULT_LIMITS.max_trained_tokens
    tables = (
        (BaseModule("embed", num_rows, hidden_size, "0" * 64, is_embedding=True),),
        (BaseModule("lm_head", hidden_size, num_rows, "0" * 64),),
    )
    layout = BaseLayout("fingerprint", "float32", tables, ())
    source_bytes = 2 * num_tokens * hidden_size
    packed_bytes = plan_payload(tables, [num_tokens, num_tokens], "float32").size_bytes
    assert packed_bytes > 64 * MIB + 4 * source_bytes
    assert packed_bytes < _resources(source_bytes, layout, DEFAULT_LIMITS).file_size_bytes - 60 * MIB


def peak_of(folder: Path, features: int, rank: int) -> int:
    layout = wide_layout(features)
    size = write_sparse_adapter(folder, features, rank)
    answer, peak = run_child(job_for(folder, layout, size))
    assert answer.manifest is not None, answer.report.summary
    packed = read_packed(folder / PACKED_NAME, layout_fingerprint=layout.fingerprint)
    assert packed.size_bytes == size // 2
    return peak


def test_memory_does_not_grow_with_the_adapter(tmp_path: Path) -> None:
    small = peak_of(tmp_path / "small", 1024, 8)
    large = peak_of(tmp_path / "large", 128 * 1024, 256)
    assert large - small < 48 * MIB, f"{small / MIB:.0f} MiB for 64 KiB, {large / MIB:.0f} MiB for 256 MiB"


@pytest.mark.slow
def test_two_gigabytes_take_the_memory_of_a_small_adapter(tmp_path: Path) -> None:
    peak = peak_of(tmp_path / "adapter", 512 * 1024, 512)
    assert peak < 160 * MIB


def test_a_child_that_gave_up_its_rights_can_open_nothing_nor_exceed_its_memory(tmp_path: Path) -> None:
    """The child's own limits, applied in a separate process."""
    probe = """
import os, resource, sys
from loraserve.control.ingest.child import _give_up_rights
from loraserve.control.ingest.job import ResourceLimits
_give_up_rights(ResourceLimits(cpu_s=5, address_space_bytes=1 << 30, file_size_bytes=100))
for attempt in (lambda: open("/etc/hostname"), lambda: open(sys.argv[1], "w"), os.pipe, lambda: os.open("/", 0)):
    try:
        attempt()
    except OSError as error:
        assert error.errno == 24, error
    else:
        raise SystemExit(f"{attempt} succeeded")
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
try:
    bytearray(2 << 30)
except MemoryError:
    sys.exit(0)
"""
    target = tmp_path / "new"
    assert subprocess.run([sys.executable, "-c", probe, str(target)], check=False).returncode == 0
    assert not target.exists()


def test_an_adapter_is_read_even_on_macos_where_memory_cannot_be_limited(tmp_path: Path) -> None:
    child = """
import resource, sys
from loraserve.control.ingest.child import main
sys.platform = "darwin"
setrlimit = resource.setrlimit

def of_macos(which, wanted):
    if which == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    setrlimit(which, wanted)

resource.setrlimit = of_macos
sys.exit(main())
"""
    size = write_sparse_adapter(tmp_path / "adapter", 64, 8)
    job = msgspec.json.encode(job_for(tmp_path / "adapter", wide_layout(64), size))
    done = subprocess.run([sys.executable, "-c", child], input=job, capture_output=True, check=True)
    assert msgspec.json.decode(done.stdout, type=JobAnswer).manifest is not None


def test_a_packed_file_over_the_size_limit_ends_the_child_without_an_answer(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    size = write_sparse_adapter(folder, 64 * 1024, 64)
    job = job_for(folder, wide_layout(64 * 1024), size, file_size_bytes=MIB)
    done = subprocess.run(CHILD, input=msgspec.json.encode(job), capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stdout == b""
    assert b"File too large" in done.stderr


def bench_with(tmp_path: Path, script: str) -> UploadBench:
    return UploadBench(tmp_path, command=fork_server_of(script))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "more CPU time than allowed"),
        ("raise SystemExit(3)", "exit code 3"),
        ("print('not json')", "gave no answer"),
    ],
)
def test_an_upload_whose_process_dies_fails_and_can_be_committed_again(
    script: str, reason: str, tmp_path: Path
) -> None:
    bench = bench_with(tmp_path, script)

    async def send() -> None:
        session = await bench.send(files())
        assert session.state is UploadState.FAILED
        assert reason in (session.error or "")
        assert bench.contents() == []
        assert bench.publisher.documents == {}

    asyncio.run(send())
    again = UploadBench(tmp_path)
    (session,) = again.store.sessions()

    async def commit() -> UploadState:
        await again.service.commit(ALICE, "request", session.id)
        return (await again.service.get(ALICE, session.id, wait_s=60)).state

    assert asyncio.run(commit()) is UploadState.READY
    assert len(again.contents()) == 1


FILLS_THE_DISK = """
import errno, os
from loraserve.control.ingest import child
from loraserve_adapters import packed_file

def is_full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

{patch}
child.main()
"""


@pytest.mark.parametrize("patch", ["packed_file.os.pwrite = is_full", "child._write_synced = is_full"])
def test_a_full_disk_is_named_and_what_was_written_is_removed(patch: str, tmp_path: Path) -> None:
    bench = bench_with(tmp_path, FILLS_THE_DISK.format(patch=patch))

    async def send() -> None:
        session = await bench.send(files())
        assert session.state is UploadState.FAILED
        assert session.error == "The data directory cannot be written (No space left on device). Commit again."
        remains = {os.path.basename(path) for path in bench.remains()}
        assert remains == {f"{CONFIG}.part", f"{WEIGHTS}.part", CONFIG, WEIGHTS}

    asyncio.run(send())
    again = UploadBench(tmp_path)
    (session,) = again.store.sessions()

    async def commit() -> UploadState:
        await again.service.commit(ALICE, "request", session.id)
        return (await again.service.get(ALICE, session.id, wait_s=60)).state

    assert asyncio.run(commit()) is UploadState.READY


def test_a_process_that_hangs_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    async def run() -> None:
        ingest = Ingest(
            packed_dir=packed_folder(tmp_path),
            layout=tiny_layout,
            timeout_s=1.0,
            command=fork_server_of(script),
        )
        with pytest.raises(IngestError, match="longer than 1 s"):
            await ingest.judge(tmp_path / "a", tmp_path / "b", 10)

    asyncio.run(run())
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_no_more_processes_than_allowed_run_at_once(tmp_path: Path) -> None:
    """Each records how many are running when it starts."""
    script = f"""
import os, sys, time, pathlib
folder = pathlib.Path({str(tmp_path)!r})
mine = folder / f"running-{{os.getpid()}}"
mine.touch()
(folder / f"seen-{{os.getpid()}}").write_text(str(len(list(folder.glob("running-*")))))
time.sleep(0.05)
mine.unlink()
print('{{"report":{{"checks":[]}}}}')
"""

    async def run() -> None:
        ingest = Ingest(
            packed_dir=packed_folder(tmp_path),
            layout=tiny_layout,
            num_processes=2,
            command=fork_server_of(script),
        )
        await asyncio.gather(*(ingest.judge(tmp_path / "a", tmp_path / "b", 10) for _ in range(8)))

    asyncio.run(run())
    seen = [int(path.read_text()) for path in tmp_path.glob("seen-*")]
    assert len(seen) == 8
    assert max(seen) <= 2


async def commit_and_kill(bench: UploadBench, number: int, kill: Awaitable[None]) -> bool:
    """Commits new content; returns whether it was accepted. Checks that all of it is stored then, else nothing."""
    name, content = f"a{number}", files()
    data = {**content, CONFIG: json.dumps({**json.loads(content[CONFIG]), "lora_alpha": 8 + number}).encode()}
    before = bench.remains()
    session = await bench.service.open(ALICE, name, announced(data))
    for file, bytes_ in data.items():
        # Directly into the store: only the commit's ingest process is to be killed.
        bench.store.append(session.id, file, 0, bytes_)
    await bench.service.commit(ALICE, "request", session.id)
    killer = asyncio.ensure_future(kill)
    session = await bench.service.get(ALICE, session.id, wait_s=60)
    await killer
    contents = bench.contents()
    if session.state is UploadState.READY:
        assert session.result is not None
        assert session.result.digest in contents
        assert digest_kept(bench, session.result.digest) == session.result.digest
        read_packed(bench.ingest.packed_path(session.result.digest), layout_fingerprint=bench.layout.fingerprint)
        assert f"alice/{name}" in bench.publisher.documents
        return True
    assert session.state is UploadState.FAILED, session
    assert "SIGKILL" in (session.error or "")
    assert f"alice/{name}" not in bench.publisher.documents
    await bench.service.abort(ALICE, session.id)
    assert bench.remains() == before
    return False


async def life_of_one_process(bench: UploadBench) -> float:
    """Seconds, of the shortest life: others wait for the fork server or for a core."""
    lives_s: list[float] = []
    for number in range(6):
        started = time.perf_counter()
        session = await bench.send(files(), name=f"measured{number}")
        assert session.state is UploadState.READY
        lives_s.append((time.perf_counter() - started) / 2)  # judged once, ingested once
    return min(lives_s)


async def _kill_child(server: int, after_s: float) -> None:
    for _ in range(20_000):
        children = children_of(server)
        if children:
            break
        await asyncio.sleep(0)
    else:
        return
    await asyncio.sleep(after_s)
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            return


def test_kills_at_random_moments_leave_all_or_nothing(tmp_path: Path) -> None:
    """Until 40 kills hit a living process: how many come too late depends on how its pace changes."""
    bench, rng = UploadBench(tmp_path), random.Random(1)

    async def run() -> None:
        of_others = our_fork_servers("ingest.child")
        life_s = await life_of_one_process(bench)
        (server,) = set(our_fork_servers("ingest.child")).difference(of_others)
        num_in_time, num_kills = 0, 0
        while num_in_time < 40:
            assert num_kills < 400
            kill = _kill_child(server, rng.random() * 1.1 * life_s)
            num_in_time += not await commit_and_kill(bench, num_kills, kill)
            num_kills += 1

    asyncio.run(run())


def test_a_kill_at_any_file_change_leaves_all_or_nothing(tmp_path: Path) -> None:
    """At the process's first change, then at the second and so on, until it completes."""
    num_changes = tmp_path / "num-changes"
    script = f"""
from pathlib import Path
from loraserve.control.ingest.child import main
from tests.support.crash_points import die_at_change
die_at_change(int(Path({str(num_changes)!r}).read_text()))
main()
"""
    imports = f"sys.path[:] = {sys.path!r}\nimport loraserve.control.ingest.child, tests.support.crash_points"
    bench = UploadBench(tmp_path / "data", command=fork_server_of(script, imports))

    async def run() -> int:
        for number in itertools.count():
            num_changes.write_text(str(number))
            if await commit_and_kill(bench, number, asyncio.sleep(0)):
                return number
        raise AssertionError("unreachable")

    assert asyncio.run(run()) >= 15


def test_a_blob_is_packed_again_for_another_base(tmp_path: Path) -> None:
    bench = UploadBench(tmp_path)

    async def run() -> None:
        session = await bench.send(files())
        assert session.result is not None
        digest = session.result.digest
        folder = bench.blobs.folder(digest)
        assert folder is not None
        bench.layout = tiny_layout("bfloat16")
        path = await bench.ingest.pack(digest, folder)
        assert path == bench.ingest.packed_path(digest)
        packed = read_packed(path, layout_fingerprint=bench.layout.fingerprint)
        assert (packed.digest, packed.table.dtype) == (digest, "bfloat16")
        with pytest.raises(IngestError, match="damaged"):
            await bench.ingest.pack("0" * 64, folder)
        bench.layout = wide_layout(64)
        with pytest.raises(DoesNotFitError, match="does not fit the served base model"):
            await bench.ingest.pack(digest, folder)
        # Content that fit this very base once and no longer does is damaged.
        bench.layout = tiny_layout()
        (folder / WEIGHTS).chmod(0o600)
        (folder / WEIGHTS).write_bytes(b"\0" * 64)
        with pytest.raises(IngestError, match="damaged") as damaged:
            await bench.ingest.pack(digest, folder)
        assert not isinstance(damaged.value, DoesNotFitError)
        (folder / MANIFEST_FILE).write_bytes(b"{")
        with pytest.raises(IngestError, match="damaged"):
            await bench.ingest.pack(digest, folder)

    asyncio.run(run())
    assert sorted(path.suffix for path in bench.packed_dir.iterdir()) == [".packed", ".packed"]


def test_a_version_lists_the_trained_tokens_of_all_tables(tmp_path: Path) -> None:
    bench = UploadBench(tmp_path, layout=with_embedding(tiny_layout()))
    config = config_of(trainable_token_indices={"lm_head": [7, 4], "embed_tokens": [9, 4]})
    tables = ("model.embed_tokens", "lm_head")
    rows = {
        f"base_model.model.{table}.token_adapter.trainable_tokens_delta": raw_tensor(np.ones((2, HIDDEN), np.float32))
        for table in tables
    }

    async def run() -> None:
        session = await bench.send(
            files(json.dumps(config).encode(), safetensors_bytes(good_tensors() | rows, {"format": "pt"}))
        )
        assert session.result is not None, session.report
        (doc,) = bench.publisher.documents.values()
        assert [version.trained_token_ids for version in doc.versions] == [[4, 7, 9]]

    asyncio.run(run())


def test_a_version_lists_its_own_tables(tmp_path: Path) -> None:
    layout = with_embedding(tiny_layout())
    bench = UploadBench(tmp_path, layout=layout)
    config = config_of(modules_to_save=["embed_tokens", "lm_head"])
    shape = next(module.weight_shape for group in layout.groups for module in group if module.is_embedding)
    tables = {
        f"base_model.model.{name}.weight": raw_tensor(np.ones(shape, np.float32))
        for name in ("model.embed_tokens", "lm_head")
    }

    async def run() -> None:
        session = await bench.send(
            files(json.dumps(config).encode(), safetensors_bytes(good_tensors() | tables, {"format": "pt"}))
        )
        assert session.result is not None, session.report
        (doc,) = bench.publisher.documents.values()
        assert [version.own_tables for version in doc.versions] == [["model.embed_tokens", "lm_head"]]

    asyncio.run(run())


def test_a_version_says_whether_it_has_dora_or_rslora(tmp_path: Path) -> None:
    bench = UploadBench(tmp_path)

    async def run() -> None:
        for use_dora, use_rslora in itertools.product((False, True), repeat=2):
            tensors = with_magnitudes(good_tensors()) if use_dora else good_tensors()
            config = json.dumps(config_of(use_dora=use_dora, use_rslora=use_rslora)).encode()
            session = await bench.send(files(config, safetensors_bytes(tensors, {"format": "pt"})))
            assert session.result is not None, session.report
            (doc,) = bench.publisher.documents.values()
            assert (doc.versions[-1].use_dora, doc.versions[-1].use_rslora) == (use_dora, use_rslora)

    asyncio.run(run())


def test_an_adapter_of_a_headless_model_is_stored_as_such_and_can_be_packed_again(tmp_path: Path) -> None:
    """Also without a task type from its author, which an adapter of the whole model may lack too."""
    bench = UploadBench(tmp_path)
    tensors = good_tensors()
    as_headless(tensors)
    weights = safetensors_bytes(tensors, {"format": "pt"})

    async def run() -> None:
        session = await bench.send(files(weights=weights))
        assert session.result is not None, session.report
        digest = session.result.digest
        folder = bench.blobs.folder(digest)
        assert folder is not None
        assert json.loads((folder / CONFIG).read_bytes())["task_type"] == "FEATURE_EXTRACTION"
        assert load_file(folder / WEIGHTS).keys() == tensors.keys()
        packed = bench.ingest.packed_path(digest).read_bytes()
        bench.ingest.packed_path(digest).unlink()
        assert (await bench.ingest.pack(digest, folder)).read_bytes() == packed

    asyncio.run(run())


def test_an_adapter_whose_stored_config_exceeds_the_upload_limit_can_be_packed_again(tmp_path: Path) -> None:
    """Sent on one line, but stored with one line per module name."""
    bench = UploadBench(tmp_path)
    config = json.loads(files()[CONFIG])
    config["target_modules"] += [f"unused_{number}" for number in range(16_000)]

    async def run() -> None:
        session = await bench.send(files(json.dumps(config, separators=(",", ":")).encode()))
        assert session.result is not None
        folder = bench.blobs.folder(session.result.digest)
        assert folder is not None
        assert (folder / CONFIG).stat().st_size > DEFAULT_LIMITS.max_config_bytes
        path = await bench.ingest.pack(session.result.digest, folder)
        assert read_packed(path, layout_fingerprint=bench.layout.fingerprint).digest == session.result.digest

    asyncio.run(run())


def test_stored_files_contain_nothing_that_the_sender_wrote_besides_the_content(tmp_path: Path) -> None:
    bench = UploadBench(tmp_path)
    config = json.loads(files()[CONFIG]) | {
        "base_model_name_or_path": "/home/alice/secret-model",
        "lora_dropout": 0.1,
        "alice_config": None,
    }
    tensors = safetensors_bytes(good_tensors(), {"format": "pt", "note": "alice wrote this"})
    session = asyncio.run(bench.send({CONFIG: json.dumps(config).encode(), WEIGHTS: tensors}))
    assert session.result is not None
    assert digest_kept(bench, session.result.digest) == session.result.digest
    folder = bench.blobs.folder(session.result.digest)
    assert folder is not None
    kept = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"alice" not in kept
    report = report_of(session)
    assert report is not None
    assert any("alice" in check.message for check in report.checks)
    plain = asyncio.run(UploadBench(tmp_path / "other").send({**files(), WEIGHTS: safetensors_bytes(good_tensors())}))
    assert plain.result is not None
    assert plain.result.digest == session.result.digest


def test_stored_files_do_not_depend_on_how_the_same_content_was_sent(tmp_path: Path) -> None:
    tensors = good_tensors()
    config = json.loads(files()[CONFIG])
    plain = {CONFIG: json.dumps(config).encode(), WEIGHTS: safetensors_bytes(tensors, {"format": "pt"})}
    other = {
        CONFIG: json.dumps(config | {"base_model_name_or_path": "org/tiny", "lora_dropout": 0.1}, indent=4).encode(),
        WEIGHTS: safetensors_bytes(dict(reversed(tensors.items()))),
    }

    async def kept(content: dict[str, bytes], data_dir: Path, *, with_sha256: bool) -> dict[str, bytes]:
        bench = UploadBench(data_dir)
        sha256 = {name: hashlib.sha256(data).hexdigest() if with_sha256 else None for name, data in content.items()}
        announcement = [msgspec.structs.replace(file, sha256=sha256[file.name]) for file in announced(content)]
        session = await bench.service.open(ALICE, "sql", announcement)
        for name, data in content.items():
            await bench.service.put_chunk(ALICE, session.id, name, 0, body(data))
        await bench.service.commit(ALICE, "request", session.id)
        done = await bench.service.get(ALICE, session.id, wait_s=60)
        assert done.result is not None, done
        folder = bench.blobs.folder(done.result.digest)
        assert folder is not None
        return {f"{folder.name}/{path.name}": path.read_bytes() for path in folder.iterdir()}

    first = asyncio.run(kept(plain, tmp_path / "first", with_sha256=False))
    assert asyncio.run(kept(other, tmp_path / "second", with_sha256=True)) == first


def test_chunks_of_any_size_give_the_same_content(tmp_path: Path) -> None:
    bench = UploadBench(tmp_path)
    content = files()

    async def run() -> str:
        session = await bench.service.open(ALICE, "sql", announced(content))
        for name, data in content.items():
            offset = 0
            while offset < len(data):
                end = min(len(data), offset + 777)
                offset = await bench.service.put_chunk(ALICE, session.id, name, offset, body(data[offset:end], 100))
        await bench.service.commit(ALICE, "request", session.id)
        done = await bench.service.get(ALICE, session.id, wait_s=60)
        assert done.result is not None
        return done.result.digest

    in_pieces = asyncio.run(run())
    whole = asyncio.run(UploadBench(tmp_path / "other").send(content))
    assert whole.result is not None
    assert whole.result.digest == in_pieces

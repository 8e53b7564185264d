"""Every bad artifact is refused for its reason and leaves nothing behind except the record of the refusal."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from loraserve_adapters.checks import Check
from loraserve_adapters.rules import AdapterRules

from loraserve.control.ingest.processes import Ingest, packed_folder
from loraserve.control.ingest.report import AdapterRejectedError, Report
from loraserve.control.uploads.states import report_of
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.errors import UploadFileError
from loraserve.store.upload_session import UploadFile, UploadState
from tests.support.uploads import ALICE, UploadBench, announced
from tests.unit.adapters.folders import tiny_layout
from tests.zoo.artifacts import ARTIFACTS, CONFIG, WEIGHTS, Artifact, files, many_config_keys


@pytest.fixture(scope="module")
def packed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_folder(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def ingest(packed_dir: Path) -> Ingest:
    rules = AdapterRules(base_names=("org/tiny",), chat_templates=())
    return Ingest(packed_dir=packed_dir, layout=tiny_layout, rules=rules)


def test_the_zoo_has_at_least_80_artifacts_with_distinct_names() -> None:
    names = [artifact.name for artifact in ARTIFACTS]
    assert len(set(names)) == len(names) >= 80


def test_the_good_adapter_behind_the_bad_ones_is_accepted(tmp_path: Path) -> None:
    bench = UploadBench(tmp_path)
    session = asyncio.run(bench.send(files()))
    assert session.state is UploadState.READY
    assert len(bench.contents()) == 1


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=lambda artifact: artifact.name)
def test_each_artifact_is_refused_with_its_reason_and_leaves_no_files(
    artifact: Artifact, tmp_path: Path, packed_dir: Path, ingest: Ingest
) -> None:
    bench = UploadBench(tmp_path, shared_ingest=ingest)
    report = asyncio.run(refusal(bench, artifact.make()))
    assert artifact.code in report.codes, report.summary
    failure = next(check for check in report.failures if check.code == artifact.code)
    assert artifact.key is None or any(
        artifact.key in (check.key or "") for check in report.failures if check.code == artifact.code
    )
    assert_can_be_shown(failure)
    assert bench.remains() == []
    assert list(packed_dir.iterdir()) == []
    assert bench.publisher.documents == {}
    assert bench.smoked == []
    (session,) = bench.store.sessions()
    assert session.state is UploadState.REJECTED
    assert report_of(bench.store.load(session.id)) == report


async def refusal(bench: UploadBench, content: dict[str, bytes]) -> Report:
    try:
        session = await bench.send(content)
    except AdapterRejectedError as error:
        return error.report
    assert session.state is UploadState.REJECTED, (session.state, session.error)
    report = report_of(session)
    assert report is not None
    return report


def assert_can_be_shown(check: Check) -> None:
    assert check.remedy
    assert check.file in (CONFIG, WEIGHTS)
    for text in (check.message, check.key, check.found, check.expected):
        assert text is None or (text.isascii() and len(text) < 700)


def test_a_config_of_a_million_keys_is_refused_for_its_announced_size(tmp_path: Path) -> None:
    bench = UploadBench(tmp_path)
    with pytest.raises(ServingError, match="262144") as refused:
        asyncio.run(bench.send(files(many_config_keys())))
    assert refused.value.code is ErrorCode.INVALID_VALUE
    assert bench.remains() == []
    assert bench.store.sessions() == []


@pytest.mark.parametrize(
    "name", ["adapter_model.bin", "../adapter_config.json", "adapter_config.json\0", "/etc/passwd", "", "README.md"]
)
def test_unexpected_file_names_are_refused_when_the_upload_is_opened(name: str, tmp_path: Path) -> None:
    bench = UploadBench(tmp_path)
    other = [UploadFile(name=CONFIG, size_bytes=2), UploadFile(name=name, size_bytes=10)]
    with pytest.raises((ServingError, UploadFileError)):
        asyncio.run(bench.service.open(ALICE, "sql", other))
    assert bench.remains() == []
    assert bench.store.sessions() == []


def as_link(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "secret")
    (folder / name).symlink_to(folder.parent / "secret")


def as_fifo(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def as_folder(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def as_device(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")


def as_pickle(folder: Path, name: str) -> None:
    (folder / name).rename(folder / "adapter_model.bin")


def as_missing(folder: Path, name: str) -> None:
    (folder / name).unlink()


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("disguise", [as_link, as_fifo, as_folder, as_device, as_pickle, as_missing])
def test_local_folders_without_plain_files_are_refused(
    disguise: Callable[[Path, str], None], file: str, tmp_path: Path
) -> None:
    bench = UploadBench(tmp_path / "data")
    folder = local_folder(tmp_path / "adapter")
    disguise(folder, file)
    with pytest.raises(ServingError, match=file) as refused:
        asyncio.run(bench.service.from_path(ALICE, "request", "sql", folder, roots=None))
    assert refused.value.code in (ErrorCode.ADAPTER_INVALID, ErrorCode.ADAPTER_NOT_FOUND)
    assert bench.remains() == []


def local_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, data in files().items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("path", ["../outside", "link", "/etc", "missing", "adapter/adapter_config.json", "a\0b"])
def test_paths_that_are_not_folders_below_an_allowed_root_are_refused(path: str, tmp_path: Path) -> None:
    bench = UploadBench(tmp_path / "data")
    root = tmp_path / "root"
    local_folder(root / "adapter")
    outside = local_folder(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    with pytest.raises(ServingError, match="no adapter folder") as refused:
        asyncio.run(bench.service.from_path(ALICE, "request", "sql", root / path, roots=[root]))
    assert refused.value.code is ErrorCode.ADAPTER_NOT_FOUND
    assert bench.remains() == []


def test_a_local_folder_below_a_root_is_accepted(tmp_path: Path) -> None:
    bench = UploadBench(tmp_path / "data")
    folder = local_folder(tmp_path / "root" / "adapter")
    session = asyncio.run(bench.service.from_path(ALICE, "request", "sql", folder, roots=[tmp_path / "root"]))
    assert session.state is UploadState.READY
    assert len(bench.contents()) == 1


def as_snapshot(hub: Path) -> Path:
    """A snapshot laid out as in Hugging Face's cache."""
    blobs = local_folder(hub / "blobs")
    snapshot = hub / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    assert (snapshot / CONFIG).read_bytes() == (blobs / CONFIG).read_bytes()
    return snapshot


def test_a_snapshot_is_accepted_if_its_link_targets_are_below_a_root(tmp_path: Path) -> None:
    bench = UploadBench(tmp_path / "data")
    snapshot = as_snapshot(tmp_path / "hub")
    (tmp_path / "linked-root").symlink_to(tmp_path / "hub")
    roots = [(tmp_path / "linked-root").resolve()]  # as the command line does
    session = asyncio.run(bench.service.from_path(ALICE, "request", "sql", snapshot, roots=roots))
    assert session.state is UploadState.READY
    assert len(bench.contents()) == 1


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_links_that_lead_out_of_the_roots_are_not_followed(file: str, tmp_path: Path) -> None:
    bench = UploadBench(tmp_path / "data")
    root = as_snapshot(tmp_path / "hub")  # its own links lead out
    (root / file).unlink()
    (root / file).write_bytes(files()[file])
    with pytest.raises(ServingError, match="symbolic link that does not lead to a readable file below") as refused:
        asyncio.run(bench.service.from_path(ALICE, "request", "sql", root, roots=[root]))
    assert refused.value.code is ErrorCode.ADAPTER_INVALID
    assert bench.remains() == []


def test_files_that_differ_from_their_announced_sha256_are_refused(tmp_path: Path) -> None:
    bench = UploadBench(tmp_path)
    content = files()

    async def send() -> Report:
        wrong = [UploadFile(name=file.name, size_bytes=file.size_bytes, sha256="0" * 64) for file in announced(content)]
        session = await bench.service.open(ALICE, "sql", wrong)
        for name, data in content.items():
            bench.store.append(session.id, name, 0, data)
        await bench.service.commit(ALICE, "request", session.id)
        settled = await bench.service.get(ALICE, session.id, wait_s=60)
        report = report_of(settled)
        assert report is not None
        return report

    report = asyncio.run(send())
    assert report.codes == ["sha256_mismatch"] * 2
    assert bench.remains() == []


def test_costly_patterns_are_refused_naming_their_field(tmp_path: Path) -> None:
    costly = {"#" + r"((.*a.*)*(.*b.*)*)*" * 20 + ".*" * number: 4 for number in range(22)}
    config = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear", "rank_pattern": costly}
    bench = UploadBench(tmp_path, layout=tiny_layout(num_layers=100))
    report = asyncio.run(refusal(bench, files(json.dumps(config).encode())))
    assert ("pattern_too_complex", "rank_pattern") in [(check.code, check.key) for check in report.failures]
    assert bench.remains() == []


def test_all_faults_are_listed_not_only_the_first(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 0, "lora_alpha": "x", "use_qalora": True, "nonsense": 1, "target_modules": []}
    report = asyncio.run(refusal(UploadBench(tmp_path), files(json.dumps(config).encode())))
    assert sorted(check.key or "" for check in report.failures) == [
        "lora_alpha",
        "nonsense",
        "r",
        "target_modules",
        "use_qalora",
    ]

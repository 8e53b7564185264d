import fcntl
import os
import re
import stat
from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest
import rich_click as click
from msgspec import Raw

from loraserve.cli.batches.answers_file import open_answers
from loraserve.cli.batches.batch_answer import BatchAnswer, BatchResponse
from loraserve.cli.failure import Failure

IDS = frozenset({"a", "b", "c"})


def answer(custom_id: str, status: int = 200, body: bytes = b'{"x":0.10}') -> BatchAnswer:
    return BatchAnswer(f"batch_req_{custom_id}", custom_id, BatchResponse(status, "r", Raw(body)))


LOST = BatchAnswer("batch_req_c", "c", None, Failure("timeout", "too late"))


def add(path: Path, *answers: BatchAnswer, resume: bool = False, custom_ids: Collection[str] = IDS) -> frozenset[str]:
    """Returns the ids that were answered before."""
    with open_answers(path, custom_ids, resume=resume) as opened:
        for each in answers:
            opened.add(each)
        return opened.answered


def refusal(path: Path, *, resume: bool = True) -> str:
    with pytest.raises(click.ClickException) as refused:
        add(path, resume=resume)
    return refused.value.message


def test_lines_have_the_format_of_openais_batch_output(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    add(path, answer("a"), LOST)
    assert path.read_text().splitlines() == [
        '{"id":"batch_req_a","custom_id":"a","response":{"status_code":200,"request_id":"r","body":{"x":0.10}},'
        '"error":null}',
        '{"id":"batch_req_c","custom_id":"c","response":null,"error":{"code":"timeout","message":"too late"}}',
    ]


def test_a_line_is_written_as_soon_as_it_is_added(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with open_answers(path, IDS, resume=False) as opened:
        opened.add(answer("a"))
        assert path.read_bytes() == msgspec.json.encode(answer("a")) + b"\n"


def test_an_existing_file_is_refused_and_kept_without_resume(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    add(path, answer("a"))
    before = path.read_bytes()
    assert "exists: continue it with --resume" in refusal(path, resume=False)
    assert path.read_bytes() == before


def test_resuming_keeps_answers_and_drops_failures(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    add(path, answer("a"), answer("b", 429, b'{"error":{"message":"later"}}'), LOST)
    path.chmod(0o640)
    assert add(path, answer("b"), resume=True) == {"a"}
    lines = [msgspec.json.decode(line, type=BatchAnswer) for line in path.read_bytes().splitlines()]
    assert [line.custom_id for line in lines] == ["a", "b"]
    assert [line.failure for line in lines] == [None, None]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["answers.jsonl"]


def test_resuming_drops_an_incomplete_last_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    add(path, answer("a"), answer("b"))
    path.write_bytes(path.read_bytes()[:-1])
    assert add(path, answer("b"), resume=True) == {"a"}
    assert add(path, resume=True) == {"a", "b"}


def test_resuming_creates_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    assert add(path, answer("a"), resume=True) == frozenset()
    assert add(path, resume=True) == {"a"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"custom_id":"a"}\n', "line 2 is not an answer"),
        (b"\n", "line 2 is not an answer"),
        (msgspec.json.encode(answer("other")) + b"\n", "line 2 answers 'other', which is not in the requests file"),
    ],
)
def test_a_file_with_other_content_is_refused_and_kept(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    content = msgspec.json.encode(answer("a")) + b"\n" + line
    path.write_bytes(content)
    assert message in refusal(path)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["answers.jsonl"]


def test_a_file_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with open_answers(path, IDS, resume=False):
        assert "is in use by another process" in refusal(path)
    assert add(path, resume=True) == frozenset()


@pytest.mark.parametrize("resume", [False, True])
def test_a_path_that_cannot_be_written_is_reported(resume: bool, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "answers.jsonl"
    assert refusal(path, resume=resume) == f"{path}: No such file or directory"


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    path = tmp_path / "answers.jsonl"
    with open_answers(path, IDS, resume=False) as opened:
        opened.add(answer("a"))
        with full.open("wb") as file:
            os.dup2(file.fileno(), opened.file.fileno())
        with pytest.raises(click.ClickException, match=re.escape(f"{path}: No space left on device")):
            opened.add(answer("b"))
    assert add(path, resume=True) == {"a"}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_a_path_that_is_not_a_regular_file_is_refused_and_not_changed(kind: str, resume: bool, tmp_path: Path) -> None:
    path = Path("/dev/null") if kind == "device" else tmp_path / "answers.jsonl"
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    before = path.stat().st_mode
    assert refusal(path, resume=resume) == f"{path} is not a regular file"
    assert path.stat().st_mode == before


def test_the_target_of_a_symbolic_link_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, path = tmp_path / "link", tmp_path / "there" / "answers.jsonl"
    link.symlink_to(path)
    add(link, answer("a"))
    assert add(link, answer("b"), resume=True) == {"a"}
    assert link.is_symlink()
    assert add(path, resume=True) == {"a", "b"}


def test_a_file_that_is_replaced_while_being_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.jsonl"
    add(path, answer("a"))
    lock = fcntl.flock

    def lock_late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        add(path, answer("b"), resume=True)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    assert "was just replaced by another process" in refusal(path)
    assert add(path, resume=True) == {"a", "b"}


def test_a_line_without_response_and_error_does_not_count_as_answered(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"id":"x","custom_id":"a","response":null,"error":null}\n')
    assert add(path, resume=True) == frozenset()

"""Real processes on one data directory: races, and kill -9 at any moment."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from loraserve.store.documents import DocumentStore
from loraserve.store.records import DocumentKind
from tests.support.store_documents import revisions

ROOT = Path(__file__).parents[2]
ADAPTER = DocumentKind.ADAPTER


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.store_documents", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_four_racing_processes_leave_no_gap_and_one_winner_per_revision(tmp_path: Path) -> None:
    processes = [start("race", tmp_path / "data", 120) for _ in range(4)]
    assert [process.stdout.readline() for process in processes if process.stdout] == ["ready\n"] * 4
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    won = [list(map(int, process.communicate()[0].split())) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert Counter(rev for revisions in won for rev in revisions) == Counter(range(1, 121))
    history = revisions(DocumentStore(tmp_path / "data"), "acme/raced", 1000)
    assert [document.rev for document in history] == list(range(120, 0, -1))


def test_no_revision_of_a_reused_name_is_lost_while_others_remove_its_document(tmp_path: Path) -> None:
    """If one were lost, it could be committed again."""
    processes = [start(job, tmp_path / "data", 300) for job in ("reuse", "reuse", "retire", "retire")]
    assert [process.stdout.readline() for process in processes if process.stdout] == ["ready\n"] * 4
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [list(map(int, process.communicate(timeout=120)[0].split())) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert Counter(rev for revisions in printed[:2] for rev in revisions) == Counter(range(1, 301))
    retired = Counter(rev for revisions in printed[2:] for rev in revisions)
    assert len(retired) > 10
    assert set(retired.values()) == {1}


def test_a_killed_writer_tears_no_document_and_loses_nothing_it_confirmed(tmp_path: Path) -> None:
    """Confirmed = printed. Twelve kills, each after a random number of commits, somewhere in the next."""
    chance = random.Random(5)
    confirmed: dict[str, int] = {}
    for number in range(12):
        process = start("write", tmp_path / "data", f"writer{number}")
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 40)):
            read_confirmation(process.stdout.readline(), confirmed)
        for _ in range(chance.randrange(20_000)):
            pass
        process.kill()
        for line in process.stdout.read().splitlines(keepends=True):
            read_confirmation(line, confirmed)
        process.communicate()

    damages: list[Exception] = []
    store = DocumentStore(tmp_path / "data", on_damage=damages.append)
    found = {document.id: document.rev for document in store.scan(ADAPTER)}
    assert damages == []
    assert all(found[document_id] >= rev for document_id, rev in confirmed.items())
    assert sum(found.values()) - sum(confirmed.values()) <= 12
    for document_id, rev in found.items():
        assert [document.rev for document in revisions(store, document_id, 1000)] == list(range(rev, 0, -1))
    assert damages == []
    assert len(confirmed) > 12


def read_confirmation(line: str, confirmed: dict[str, int]) -> None:
    if line.endswith("\n"):
        document_id, rev = line.split()
        confirmed[document_id] = int(rev)


@pytest.mark.parametrize("content", [b"", b"{"])
def test_the_test_above_would_notice_a_torn_document(tmp_path: Path, content: bytes) -> None:
    process = start("race", tmp_path / "data", 1)
    assert process.communicate("go\n")[0] == "ready\n1\n"
    (path,) = (tmp_path / "data" / "docs").glob("*/*/*/*")
    path.write_bytes(content)
    damages: list[Exception] = []
    assert list(DocumentStore(tmp_path / "data", on_damage=damages.append).scan(ADAPTER)) == []
    assert len(damages) == 1

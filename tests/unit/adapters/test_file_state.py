import os
from pathlib import Path

from loraserve_adapters.file_state import SETTLED_NS, FileState, file_state


def state_of(path: Path) -> FileState:
    state = file_state(path)
    assert state is not None
    return state


def test_a_replaced_file_has_another_state_even_with_the_same_mtime(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    assert file_state(path) is None
    path.write_bytes(b"content")
    first = state_of(path)
    assert state_of(path) == first
    other.write_bytes(b"CONTENT")
    os.utime(other, ns=(first.modified_ns, first.modified_ns))
    other.replace(path)
    replaced = state_of(path)
    assert replaced != first
    # Like a program that writes to the file and then resets its mtime to hide it.
    os.utime(path, ns=(0, replaced.modified_ns + 1))
    os.utime(path, ns=(0, replaced.modified_ns))
    hidden = state_of(path)
    assert hidden.modified_ns == replaced.modified_ns
    assert hidden.changed_ns >= replaced.changed_ns


def test_a_state_is_settled_some_time_after_the_newest_of_its_timestamps() -> None:
    for state in (FileState(1, 2, 3, 4, 50), FileState(1, 2, 3, 50, 4)):
        assert not state.was_settled(50 + SETTLED_NS)
        assert state.was_settled(51 + SETTLED_NS)

import errno
import os
from pathlib import Path

import pytest

from loraserve.models.model_place import why_absent


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def add_model(cache: Path, name: str, revision: str) -> None:
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / revision).write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")


def test_a_directory_needs_a_config(tmp_path: Path):
    assert why_absent(str(tmp_path), None) == f"{tmp_path} has no config.json: give the saved model's directory"
    (tmp_path / "config.json").touch()
    assert why_absent(str(tmp_path), None) is None


def test_an_unreadable_directory_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: str | Path, *_: object, **__: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    is_dir = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: True if path == str(tmp_path) else is_dir(path))
    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert why_absent(str(tmp_path), None) == f"{tmp_path} is not readable by this user (uid {os.getuid()})"


@pytest.mark.parametrize("model", ["/does/not/exist", "..x/y", "org/name/more", "org/name", "a name", "a" * 5000])
def test_a_model_that_is_neither_a_directory_nor_cached_is_absent(cache: Path, model: str):
    where = "the local Hugging Face cache: `hf download` puts models there"
    assert why_absent(model, None) == f"{model} is neither a directory nor a model in {where}"


def test_a_cached_model_is_present_only_in_the_cached_revision(cache: Path):
    add_model(cache, "org/name", "main")
    assert why_absent("org/name", None) is None
    assert why_absent("org/name", "main") is None
    assert why_absent("org/name", "v2") is not None


def test_an_uncached_model_is_not_reported_absent_if_downloads_are_allowed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert why_absent("org/name", None) is None

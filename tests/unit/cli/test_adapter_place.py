from pathlib import Path

import pytest
from click.testing import CliRunner

from loraserve.cli.adapter_place import find_adapter
from loraserve.cli.main import main
from tests.support.hugging_face_cache import add_to_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_folder_takes_precedence_over_a_name_in_the_cache(cache: Path) -> None:
    snapshot = add_to_cache(cache, "org/sql")
    assert find_adapter("org/sql") == snapshot
    Path("org/sql").mkdir(parents=True)
    assert find_adapter("org/sql") == Path("org/sql")


@pytest.mark.parametrize("place", ["/does/not/exist", "..x/y", "org/name/more", "org/name", "name", "a" * 5000])
def test_a_place_that_is_neither_folder_nor_cached_is_not_found(cache: Path, place: str) -> None:
    assert find_adapter(place) is None


@pytest.mark.parametrize("args", [["add", "sql"], ["validate"]])
@pytest.mark.parametrize(
    ("place", "message"),
    [("org/sql", "`hf download org/sql` puts it there"), ("/no/folder", "/no/folder is not a folder")],
)
def test_commands_explain_how_to_get_a_missing_adapter(cache: Path, args: list[str], place: str, message: str) -> None:
    ended = CliRunner().invoke(main, ["adapter", *args, place], env={"COLUMNS": "300"})
    assert ended.exit_code == 2
    assert message in " ".join(ended.output.split())


def test_validate_reads_a_cached_adapter(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = add_to_cache(cache, "org/sql")
    asked: list[Path] = []
    monkeypatch.setattr(
        "loraserve.cli.admin.adapter_validate.validate_folder", lambda folder, model, as_json: asked.append(folder)
    )
    assert CliRunner().invoke(main, ["adapter", "validate", "org/sql"]).exit_code == 0
    assert asked == [snapshot]

from pathlib import Path

import pytest
import rich_click as click

from loraserve.cli.admin import adapter_validate
from loraserve.engine.config import EngineConfig
from loraserve.serving.process.local_engine import EngineStartFailedError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Configs of the engines that were to start; none does."""
    configs: list[EngineConfig] = []

    async def start(config: EngineConfig, *_: object) -> None:
        configs.append(config)
        raise EngineStartFailedError("not here")

    monkeypatch.setattr(adapter_validate.LocalEngine, "start", start)
    return configs


def kernels_for(model: str | None, asked: list[EngineConfig]) -> str | None:
    with pytest.raises(click.ClickException, match="not here"):
        adapter_validate.validate_folder(Path("folder"), model, False)
    return asked[-1].kernel_cache_dir


def test_kernels_compiled_by_a_server_of_the_same_user_are_used(
    asked: list[EngineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert kernels_for(None, asked) is None
    for folder in ("kernels", "demo/kernels"):
        (tmp_path / "loraserve" / folder).mkdir(parents=True)
    assert kernels_for(None, asked) == str(tmp_path / "loraserve/demo/kernels")
    assert kernels_for("path/to/model", asked) == str(tmp_path / "loraserve/kernels")


def test_a_user_without_a_home_can_validate(asked: list[EngineConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise click.UsageError("no home")

    monkeypatch.setattr(adapter_validate, "default_data_dir", fail)
    assert kernels_for(None, asked) is None

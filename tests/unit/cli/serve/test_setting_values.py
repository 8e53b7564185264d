from pathlib import Path

import pytest
import rich_click as click

from loraserve.cli.serve import command as serve_module
from loraserve.cli.serve import setting_values
from loraserve.cli.serve.settings import ServeSettings
from loraserve.serving.settings import SettingSource, SettingValue


def values(monkeypatch: pytest.MonkeyPatch, *args: str, **environment: str) -> dict[str, SettingValue]:
    """The settings that a server started with these arguments would show."""
    found: list[ServeSettings] = []

    def keep(settings: ServeSettings, ctx: click.Context, positional_model: str | None) -> ServeSettings:
        found.append(setting_values.with_setting_values(settings, ctx, positional_model))
        raise click.Abort

    monkeypatch.setattr(serve_module, "with_setting_values", keep)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(click.Abort):
        serve_module.serve.main([*args], standalone_mode=False)
    return {value.name: value for value in found[0].config}


def test_each_value_has_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("max-num-seqs = 7\nseed = 5\n")
    found = values(monkeypatch, "--port", "81", "--config", str(config), "--seed", "6", LORASERVE_BLOCK_SIZE="32")
    assert {
        name: (found[name].value, found[name].source) for name in ("port", "max-num-seqs", "seed", "block-size")
    } == {
        "port": ("81", SettingSource.FLAG),
        "max-num-seqs": ("7", SettingSource.FILE),
        "seed": ("6", SettingSource.FLAG),
        "block-size": ("32", SettingSource.ENVIRONMENT),
    }
    assert (found["redis-prefix"].source, found["host"].source) == (SettingSource.DEFAULT, SettingSource.DERIVED)
    assert found["host"].value == "127.0.0.1"
    assert found["port"].help == "0 = any free port."


def test_a_model_given_as_an_argument_counts_as_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    model = values(monkeypatch, "some/model")["model"]
    assert (model.value, model.source) == ("some/model", SettingSource.FLAG)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:hunter2@host:6379/1", "redis://user:***@host:6379/1"),
        ("redis://:hunter2@host", "redis://:***@host"),
        ("redis://host/0?password=hunter2", "redis://host/0?***"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch, url: str, shown: str) -> None:
    found = values(monkeypatch, "--api-key", "hunter2", "--redis-url", url)
    assert found["api-key"].value == "***"
    assert found["redis-url"].value == shown
    assert "hunter2" not in repr(found)


def test_lists_and_switches_are_shown_as_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found = values(
        monkeypatch, "m", "--lora-modules", "a=/x", "b=/y", "--no-certificates", "--allowed-hosts", "one", "two"
    )
    assert found["lora-modules"].value == "a=/x, b=/y"
    assert found["certificates"].value == "off"
    assert found["allowed-hosts"].value == "one, two"
    assert found["adapter-dir"].value == ""


def test_the_traces_endpoint_is_shown_from_flag_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:hunter2@collector:4318"}
    found = values(monkeypatch, **variable)["otlp-traces-endpoint"]
    assert (found.value, found.source) == ("http://user:***@collector:4318/v1/traces", SettingSource.DERIVED)
    given = values(monkeypatch, "--otlp-traces-endpoint", "http://c:4318?key=hunter2")["otlp-traces-endpoint"]
    assert (given.value, given.source) == ("http://c:4318/v1/traces?***", SettingSource.FLAG)

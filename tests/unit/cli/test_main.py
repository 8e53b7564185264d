import json
from importlib import metadata

from click.testing import CliRunner

from loraserve.cli.main import main


def output_of(*args: str) -> str:
    result = CliRunner().invoke(main, args, prog_name="loraserve")
    assert result.exit_code == 0, result.output
    return result.output


def test_version_is_available_as_a_flag_and_a_command() -> None:
    line = f"loraserve {metadata.version('loraserve')}\n"
    assert output_of("--version") == line
    assert output_of("version").startswith(line)


def test_openapi_prints_the_document() -> None:
    assert "/v1/completions" in json.loads(output_of("openapi"))["paths"]

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
from click.testing import CliRunner

from loraserve.cli.admin import tenants
from loraserve.cli.main import main
from loraserve.control.tenancy.tenants import MAX_WEIGHT


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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_a_full_disk_is_reported_in_one_line() -> None:
    command = [sys.executable, "-m", "loraserve.cli.main", "version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: cannot write: No space left on device\n"


@pytest.mark.parametrize(
    "command",
    [
        ["chat", "--temperature", "nan"],
        ["bench", "http://127.0.0.1:1", "--request-rate", "nan"],
        ["usage", "--hours", "nan"],
        ["tenants", "create", "acme", "--weight", "nan"],
        ["tenants", "update", "acme", "--weight", "inf"],
    ],
)
def test_numbers_that_are_none_are_refused_with_their_option(command: list[str]) -> None:
    result = CliRunner().invoke(main, command, prog_name="loraserve")
    assert result.exit_code == 2
    assert f"'{command[-2]}'" in result.output


def test_the_largest_weight_is_the_servers() -> None:
    assert tenants.MAX_WEIGHT == MAX_WEIGHT

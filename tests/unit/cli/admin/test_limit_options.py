import click
import pytest
from click.testing import CliRunner

from loraserve.cli.admin.limit_options import TENANT_LIMITS, given_limits, with_limits


def given(*args: str) -> dict[str, int | None]:
    found: list[dict[str, int | None]] = []

    @click.command()
    @with_limits(TENANT_LIMITS)
    def command(**limits: object) -> None:
        found.append(given_limits(limits))

    result = CliRunner().invoke(command, args)
    if result.exit_code:
        raise ValueError(result.output)
    return found[0]


def test_only_given_options_are_returned() -> None:
    assert given() == {}
    assert given("--max-queued", "0", "--requests-per-min", "600") == {"max_queued": 0, "requests_per_min": 600}


def test_none_lifts_a_limit() -> None:
    assert given("--requests-per-min", "none", "--max-adapters", "7") == {"requests_per_min": None, "max_adapters": 7}


@pytest.mark.parametrize("value", ["-1", "nobody", "1.5", ""])
def test_an_invalid_number_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="--max-queued"):
        given("--max-queued", value)

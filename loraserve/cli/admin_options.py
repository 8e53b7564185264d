"""What every command that talks to a server's management API takes: where it is, who asks, and how to print."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import rich_click as click

T = TypeVar("T", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Connection:
    url: str
    api_key: str | None
    tenant: str | None
    as_json: bool


def with_connection(command: T) -> T:
    """Adds --url, --api-key, --tenant and --json, which the command gets as `connection`; its errors end with 1."""

    @click.option("--url", default="http://127.0.0.1:8000", envvar="LORASERVE_URL", show_default=True, help="Server.")
    @click.option("--api-key", envvar=["LORASERVE_API_KEY", "OPENAI_API_KEY"], help="Sent as a bearer token.")
    @click.option("--tenant", envvar="LORASERVE_TENANT", help="Act for this one; with a key for all tenants ('*').")
    @click.option("--json", "as_json", is_flag=True, help="Print what the server answers.")
    @wraps(command)
    def wrapped(*, url: str, api_key: str | None, tenant: str | None, as_json: bool, **given: Any) -> None:
        from loraserve.cli.admin_client import AdminError
        from loraserve.cli.admin_output import print_report

        try:
            command(connection=Connection(url, api_key, tenant, as_json), **given)
        except AdminError as error:
            if error.report is not None:
                print_report(error.report)
            raise click.ClickException(str(error)) from error

    return cast(T, wrapped)

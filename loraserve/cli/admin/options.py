"""Options of every command that calls a server's management API: its address, the key and tenant, the output format."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import rich_click as click

if TYPE_CHECKING:
    from loraserve.cli.admin.client import AdminClient

T = TypeVar("T", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Connection:
    context: click.Context
    url: str
    api_key: str | None
    tenant: str | None
    as_json: bool

    def client(self, *, as_tenant: bool = True) -> "AdminClient":
        """Closed when the command ends. as_tenant: False = for all tenants, ignoring --tenant."""
        from loraserve.cli.admin.client import connected

        opened = connected(self.url, self.api_key, self.tenant if as_tenant else None)
        return self.context.with_resource(opened)

    def show(self, answer: dict[str, Any], text: str) -> None:
        """Prints the answer with --json, otherwise the text."""
        from loraserve.cli.admin.output import print_json

        if self.as_json:
            print_json(answer)
        else:
            click.echo(text)


def with_connection(command: T) -> T:
    """Adds --url, --api-key, --tenant and --json, passed to the command as `connection`. `AdminError` exits with 1."""

    @click.option(
        "--url", default="http://127.0.0.1:8000", envvar="LORASERVE_URL", show_default=True, help="Server address."
    )
    @click.option("--api-key", envvar=["LORASERVE_API_KEY", "OPENAI_API_KEY"], help="Sent as a bearer token.")
    @click.option("--tenant", envvar="LORASERVE_TENANT", help="Act for this tenant; needs a key for all tenants ('*').")
    @click.option("--json", "as_json", is_flag=True, help="Print the server's response as JSON.")
    @click.pass_context
    @wraps(command)
    def wrapped(
        context: click.Context, *, url: str, api_key: str | None, tenant: str | None, as_json: bool, **given: Any
    ) -> None:
        from loraserve.cli.admin.client import AdminError
        from loraserve.cli.admin.output import print_report

        try:
            command(connection=Connection(context, url, api_key, tenant, as_json), **given)
        except AdminError as error:
            if error.report is not None:
                print_report(error.report)
            raise click.ClickException(str(error)) from error

    return cast(T, wrapped)

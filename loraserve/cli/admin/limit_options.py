"""Limits of keys and tenants as command-line options."""

from collections.abc import Callable
from typing import Any, TypeVar

import rich_click as click

T = TypeVar("T", bound=Callable[..., None])

KEY_LIMITS = {
    "requests_per_min": "Requests per minute.",
    "tokens_per_min": "Prompt and output tokens per minute.",
    "max_concurrent": "Concurrent requests.",
    "max_queued": "Sequences waiting for the engine.",
}
TENANT_LIMITS = KEY_LIMITS | {
    "max_adapters": "Adapters.",
    "max_adapter_bytes": "Bytes of all versions of its adapters.",
}

NO_LIMIT = "none"


class LimitType(click.IntRange):
    """A number, or `NO_LIMIT`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return NO_LIMIT if value == NO_LIMIT else super().convert(value, param, ctx)


def with_limits(limits: dict[str, str]) -> Callable[[T], T]:
    """Adds an option for each limit; `given_limits` reads them."""

    def decorate(command: T) -> T:
        for name, text in reversed(limits.items()):
            option = click.option(f"--{name.replace('_', '-')}", name, type=LimitType(0), help=text)
            command = option(command)
        return command

    return decorate


def given_limits(options: dict[str, Any]) -> dict[str, int | None]:
    """The limits that were given; None = no limit."""
    given = {name: options[name] for name in TENANT_LIMITS if options.get(name) is not None}
    return {name: None if limit == NO_LIMIT else limit for name, limit in given.items()}

"""The HTTP client of the management commands and the chat; `async_http_client` is for those that send many requests."""

from collections.abc import Mapping

import httpx
import rich_click as click

from loraserve.cli.proxy import environment_proxy


def http_client(
    url: str, api_key: str | None, timeout: float | httpx.Timeout, headers: Mapping[str, str] | None = None
) -> httpx.Client:
    """url: with or without /v1. Raises `click.ClickException` if the URL, or its proxy, cannot be used."""
    all_headers = {**({"authorization": f"Bearer {api_key}"} if api_key else {}), **(headers or {})}
    check_header_values(all_headers)
    try:
        base_url = httpx.URL(url.rstrip("/").removesuffix("/v1"))
        proxy = environment_proxy(str(base_url))
    except (ValueError, httpx.InvalidURL) as error:
        raise click.ClickException(f"{url}: {error}") from error
    try:
        return httpx.Client(
            base_url=base_url,
            headers=all_headers,
            timeout=timeout,
            verify=httpx.create_ssl_context(),
            proxy=None if proxy is None else proxy.url,
            trust_env=False,  # or httpx would choose the proxy itself
        )
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        if proxy is None:
            raise
        if isinstance(error, httpx.InvalidURL):
            raise click.ClickException(f"{proxy.named_by} is not a valid proxy URL") from error
        raise proxy.refusal(url) from error


def check_header_values(headers: Mapping[str, str]) -> None:
    """Raises `click.ClickException`, without the value: HTTP clients would quote it, and it may be a key."""
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise click.ClickException(f"the value of {name} has a line break or another forbidden character")

"""The HTTP client of commands that send many requests at a time."""

from collections.abc import Mapping
from urllib.parse import urlsplit

import aiohttp
import httpx
import rich_click as click

from loraserve.cli.proxy import environment_proxy, through_proxy

TIMEOUT_S = 600.0
"""To connect, and between any two arrivals; a stream may take as long as it likes."""
KEEPALIVE_S = 2.0
"""Of an idle connection: less than servers keep one (uvicorn, and with it vLLM and SGLang, 5 s), so that no request
meets the end of its connection and counts as failed."""


def async_http_client(
    url: str, api_key: str | None, more_headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """The URL with or without /v1. Needs a running event loop.

    aiohttp, whose parser is in C, because the server has to do without what a load test takes: 14 µs of CPU per token
    of 16 streams that arrive together and 22 of those that arrive one by one, httpx 52 and 75 (2-core Xeon).
    """
    headers = {"accept-encoding": "identity", **(more_headers or {})}
    base_url = url.rstrip("/").removesuffix("/v1") + "/"
    # The certificates that all commands trust.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=httpx.create_ssl_context())
    timeout = aiohttp.ClientTimeout(sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    try:
        if api_key and urlsplit(base_url).username is None:  # a user in the URL takes the key's place
            headers["authorization"] = f"Bearer {api_key}"
        for name, value in headers.items():
            if not (value.isascii() and value.isprintable()):
                raise click.ClickException(f"the value of {name} has a line end, or what else no header may have")
        return aiohttp.ClientSession(
            base_url, connector=connector, headers=headers, timeout=timeout, proxy=_proxy(base_url)
        )
    except ValueError as error:
        raise click.ClickException(f"{url}: {error}") from error


async def fetch(client: aiohttp.ClientSession, url: str, path: str) -> bytes | None:
    """None if there is no such route. Raises if nobody answers or the key is wrong. url: as errors name the server."""
    try:
        async with client.get(path, allow_redirects=False) as response:
            body, status = await response.read(), response.status
    except aiohttp.ClientError as error:
        message = f"{url} does not answer /{path}{through_proxy(url)}: {type(error).__name__}: {error}"
        raise click.ClickException(message) from error
    if status == 404:
        return None
    if status != 200:
        raise click.ClickException(f"{url} answers /{path} with {status} {response.reason}{through_proxy(url)}")
    return body


def without_user(url: str) -> str:
    """Nor the password: reports are shown to others."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _proxy(url: str) -> str | None:
    """The environment's. Not aiohttp's `trust_env`, which looks into .netrc in a thread for every request.

    Raises `click.ClickException` for a proxy of another kind.
    """
    proxy = environment_proxy(url)
    if proxy is None:
        return None
    if proxy.kind not in ("http", "https"):
        raise proxy.refusal(url)
    return proxy.url

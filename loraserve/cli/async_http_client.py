"""The HTTP client of commands that send many requests concurrently."""

from collections.abc import Mapping
from urllib.parse import urlsplit

import aiohttp
import httpx
import rich_click as click

from loraserve.cli.http_client import check_header_values
from loraserve.cli.proxy import environment_proxy, through_proxy

TIMEOUT_S = 600.0
"""To connect, and between two pieces of a response; the total time of a stream is not limited."""
KEEPALIVE_S = 2.0
"""For idle connections: shorter than on servers (uvicorn, so also vLLM and SGLang: 5 s), so that no request is sent on
a connection that the server is closing and counts as failed."""


def async_http_client(
    url: str, api_key: str | None, more_headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """url: with or without /v1. Needs a running event loop.

    aiohttp parses in C, which matters because a load test takes CPU time from the server. CPU time per token with 16
    streams, if their tokens arrive together or one by one: aiohttp 14 and 22 µs, httpx 52 and 75 µs (2-core Xeon).
    """
    headers = {"accept-encoding": "identity", **(more_headers or {})}
    base_url = url.rstrip("/").removesuffix("/v1") + "/"
    # The same trusted certificates as in the other commands.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=httpx.create_ssl_context())
    timeout = aiohttp.ClientTimeout(sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    try:
        if api_key and urlsplit(base_url).username is None:  # a user in the URL replaces the key
            headers["authorization"] = f"Bearer {api_key}"
        check_header_values(headers)
        return aiohttp.ClientSession(
            base_url, connector=connector, headers=headers, timeout=timeout, proxy=_proxy(base_url)
        )
    except ValueError as error:
        raise click.ClickException(f"{url}: {error}") from error


async def fetch(client: aiohttp.ClientSession, url: str, path: str) -> bytes | None:
    """None if there is no such route. Raises if there is no response or an error. url: names the server in errors."""
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
    """Removes user and password, because reports are shown to others."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _proxy(url: str) -> str | None:
    """The environment's proxy. Not by aiohttp's `trust_env`, which reads .netrc in a thread for every request.

    Raises `click.ClickException` unless it is an http or https proxy.
    """
    proxy = environment_proxy(url)
    if proxy is None:
        return None
    if proxy.kind not in ("http", "https"):
        raise proxy.refusal(url)
    return proxy.url

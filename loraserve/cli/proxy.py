"""The environment's proxy for a command's requests. Loopback addresses never use one: it would see the API key."""

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import rich_click as click


@dataclass(frozen=True, slots=True)
class Proxy:
    url: str
    """Including user and password."""
    named_by: str
    """The environment variable."""

    @property
    def kind(self) -> str:
        return self.url.partition("://")[0].lower()

    @property
    def shown(self) -> str:
        """The URL without user and password."""
        return f"{self.kind}://{self.url.partition('://')[2].rpartition('@')[2]}"

    def refusal(self, url: str) -> click.ClickException:
        """url: the server's."""
        return click.ClickException(
            f"{self.named_by} names a {self.kind} proxy: use an http or https one,"
            f" or list {urlsplit(url).hostname} in no_proxy"
        )


def environment_proxy(url: str) -> Proxy | None:
    """The proxy for a server's URL. Raises `ValueError` if that is not a URL."""
    parts = urlsplit(url)
    if parts.hostname is None or _is_loopback(parts.hostname):
        return None
    # Also try the bare host: an IPv6 address has no brackets in no_proxy.
    if proxy_bypass(parts.netloc.rpartition("@")[2]) or proxy_bypass(parts.hostname):
        return None
    proxies = getproxies()
    for kind in (parts.scheme, "all"):
        if proxy := proxies.get(kind):
            return Proxy(proxy if "://" in proxy else f"http://{proxy}", _variable(f"{kind}_proxy"))
    return None


def through_proxy(url: str) -> str:
    """The end of an error message about the server at the URL; empty without a proxy."""
    proxy = environment_proxy(url)
    return "" if proxy is None else f" through the proxy {proxy.shown}"


def _is_loopback(host: str) -> bool:
    host = host.rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _variable(name: str) -> str:
    """The name in the case that is set; proxies may also be in macOS's settings."""
    return next((spelled for spelled in (name, name.upper()) if os.environ.get(spelled)), "the system")

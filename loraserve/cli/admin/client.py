"""Talks to a server's management API for the command line."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from loraserve.cli.http_client import http_client
from loraserve.cli.proxy import through_proxy

TIMEOUT_S = 60.0
PAGE = 500
REQUEST_ID = "x-request-id"
"""A header of every response of loraserve."""
REMEDY = "start it, or give another address with --url or LORASERVE_URL"

Json = dict[str, Any]


class AdminError(Exception):
    """The message is shown to the user."""

    def __init__(self, message: str, report: Json | None = None) -> None:
        """report: the checks of a refused adapter."""
        super().__init__(message)
        self.report = report


class ConnectionLostError(AdminError):
    """There was no response; the request may or may not have taken effect."""


class ChangedMeanwhileError(AdminError):
    """The object is no longer at the revision on which the change was based."""


@dataclass(frozen=True, slots=True)
class AdminClient:
    http: httpx.Client

    def get(self, path: str, **query: str | int | float | None) -> Json:
        params = {name: value for name, value in query.items() if value is not None}
        return self._call("GET", path, params=params)

    def get_text(self, path: str, **query: str | int | float | None) -> str:
        """The text of a table, such as CSV."""
        params = {name: value for name, value in query.items() if value is not None}
        response = self._send("GET", path, params=params)
        _check(response)
        if REQUEST_ID not in response.headers or "html" in _media_type(response):
            raise _not_ours(response)
        return response.text

    def post(self, path: str, body: Json | None = None) -> Json:
        return self._call("POST", path, body=body or {})

    def put(self, path: str, body: Json) -> Json:
        return self._call("PUT", path, body=body)

    def patch(self, path: str, body: Json, *, expected_rev: int | None = None) -> Json:
        """expected_rev: raises `ChangedMeanwhileError` if it is not the newest revision."""
        headers = None if expected_rev is None else {"if-match": f'"{expected_rev}"'}
        return _checked(self._send("PATCH", path, json=body, headers=headers))

    def delete(self, path: str, *, drain_s: float | None = None) -> Json:
        """drain_s: the server may delay its response by this many seconds while requests finish."""
        if drain_s is None:
            return self._call("DELETE", path)
        timeout = httpx.Timeout(TIMEOUT_S, read=TIMEOUT_S + drain_s)
        return _checked(self._send("DELETE", path, params={"drain_s": drain_s}, timeout=timeout))

    def put_bytes(self, path: str, data: bytes, content_range: str) -> Json:
        headers = {"content-type": "application/octet-stream", "content-range": content_range}
        return _checked(self._send("PUT", path, content=data, headers=headers))

    def every(self, path: str, **query: str | None) -> list[Json]:
        """All pages of a list."""
        found: list[Json] = []
        cursor: str | None = None
        while True:
            page = self.get(path, limit=PAGE, cursor=cursor, **query)
            found += page["data"]
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    def first(self, path: str, count: int, **query: str | None) -> list[Json]:
        """The first items of a list, `count` at most; a page may have fewer items than requested."""
        found: list[Json] = []
        cursor: str | None = None
        while True:
            page = self.get(path, limit=count - len(found), cursor=cursor, **query)
            found += page["data"]
            cursor = page["next_cursor"]
            if cursor is None or len(found) == count:
                return found

    def _call(
        self, method: str, path: str, *, body: Json | None = None, params: Mapping[str, Any] | None = None
    ) -> Json:
        return _checked(self._send(method, path, json=body, params=params))

    def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            return self.http.request(method, path, **content)
        except httpx.HTTPError as error:
            base_url = str(self.http.base_url)
            message = f"no server answers at {base_url}{through_proxy(base_url)}: {error}; {REMEDY}"
            raise ConnectionLostError(message) from error


@contextlib.contextmanager
def connected(url: str, api_key: str | None, tenant: str | None) -> Iterator[AdminClient]:
    headers = {} if tenant is None else {"x-tenant": tenant}
    with http_client(url, api_key, TIMEOUT_S, headers) as http:
        yield AdminClient(http)


def _checked(response: httpx.Response) -> Json:
    _check(response)
    try:
        found = response.json() if response.content else {}
    except ValueError:
        raise _not_ours(response) from None
    if REQUEST_ID not in response.headers or not isinstance(found, dict):
        raise _not_ours(response)
    return found


def _not_ours(response: httpx.Response) -> AdminError:
    """The error for a proxy's own page or another server's response: the request did not reach loraserve."""
    what = _media_type(response) or "no media type"
    named = "" if REQUEST_ID in response.headers else f" and without {REQUEST_ID}"
    return AdminError(
        f"{response.url} answers with {what}{named}, which loraserve never does: check --url, LORASERVE_URL and any "
        "proxy in between"
    )


def _media_type(response: httpx.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0]


def _check(response: httpx.Response) -> None:
    """Raises `AdminError` with the server's message."""
    if response.is_success:
        return
    try:
        error = response.json()["error"]
        if response.status_code == httpx.codes.PRECONDITION_FAILED:
            raise ChangedMeanwhileError(error["message"])
        raise AdminError(error["message"], error.get("report"))
    except (ValueError, KeyError, TypeError):
        status = f"{response.status_code} {response.reason_phrase}"
        raise AdminError(f"the server answered {status}{through_proxy(str(response.url))}") from None

"""Uploads an adapter folder through an upload session, and resumes where a broken connection left off."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from loraserve.cli.admin.client import AdminClient, AdminError, ConnectionLostError
from loraserve.cli.admin.paths import api_path

FILES = ("adapter_config.json", "adapter_model.safetensors")
"""In the order of sending: a bad config is reported before the weights are sent."""
PICKLE = "adapter_model.bin"
"""The file that older releases of PEFT wrote instead of adapter_model.safetensors."""
MAX_TRIES = 30
RETRY_S = 2.0
"""Tries and the pause between them, the same as the console's."""
WAIT_S = 10

Json = dict[str, Any]
OnSent = Callable[[int], None]
T = TypeVar("T")


def upload(
    client: AdminClient, name: str, folder: Path, *, activate: bool, on_sent: OnSent, on_state: Callable[[str], None]
) -> Json:
    """Returns the session once it is ready. Raises `AdminError`, with the report if the adapter is refused.

    on_sent: called with the number of bytes sent, over both files.
    """
    paths = [folder / file for file in FILES]
    for path in paths:
        if not path.is_file():
            raise AdminError(f"{folder} has no {path.name}: {_remedy(folder)}")
    sizes = [path.stat().st_size for path in paths]
    body = {
        "files": [{"name": path.name, "size_bytes": size} for path, size in zip(paths, sizes, strict=True)],
        "activate": activate,
    }
    session = client.post(api_path("adapters", name, "uploads"), body)
    num_sent = 0
    for path, size in zip(paths, sizes, strict=True):
        _send_file(client, session, path, size, lambda offset, before=num_sent: on_sent(before + offset))
        num_sent += size
    return _committed(client, session["id"], on_state)


def _remedy(folder: Path) -> str:
    if (folder / PICKLE).exists():
        return f"{PICKLE} is a pickle, which can run code; save the adapter with safe_serialization=True"
    return "give the folder that PEFT's save_pretrained wrote"


def _send_file(client: AdminClient, session: Json, path: Path, size: int, on_offset: OnSent) -> None:
    offset = 0
    url = api_path("uploads", session["id"], "files", path.name)
    with path.open("rb") as file:

        def send(is_retry: bool) -> int:
            start = _received(client, session["id"], path.name) if is_retry else offset
            file.seek(start)
            data = file.read(session["chunk_bytes"])
            if not data:  # Everything had arrived; only the response was lost.
                return start
            return client.put_bytes(url, data, f"bytes {start}-{start + len(data) - 1}/{size}")["offset"]

        while offset < size:
            offset = _with_retries(send)
            on_offset(offset)


def _with_retries(attempt: Callable[[bool], T]) -> T:
    """Retries until there is a response: the server may be restarting. `attempt` gets whether it is a retry."""
    for num_failures in itertools.count(1):
        try:
            return attempt(num_failures > 1)
        except ConnectionLostError as error:
            if num_failures == MAX_TRIES:
                raise AdminError(str(error)) from error
            time.sleep(RETRY_S)
    raise AssertionError("unreachable")


def _received(client: AdminClient, upload_id: str, name: str) -> int:
    session = client.get(api_path("uploads", upload_id))
    return next(file["offset"] for file in session["files"] if file["name"] == name)


def _committed(client: AdminClient, upload_id: str, on_state: Callable[[str], None]) -> Json:
    session = _with_retries(lambda _: client.post(api_path("uploads", upload_id, "commit")))  # safe to repeat
    while session["state"] in ("validating", "loading"):
        on_state(session["state"])
        session = _with_retries(lambda _: client.get(api_path("uploads", upload_id), wait_s=WAIT_S))
    on_state(session["state"])
    if session["state"] == "rejected":
        raise AdminError("The adapter is refused.", session["report"])
    if session["state"] != "ready":
        raise AdminError(session["error"] or f"The upload is {session['state']}.")
    return session

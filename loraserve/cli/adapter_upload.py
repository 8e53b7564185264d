"""Sends an adapter folder through an upload session, and goes on where a broken connection left it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loraserve.cli.admin_client import AdminClient, AdminError, ConnectionLostError

FILES = ("adapter_config.json", "adapter_model.safetensors")
"""In the order they are sent: what is wrong with the config shows before the weights are sent."""
MAX_TRIES = 5
RETRY_S = 1.0
WAIT_S = 10

Json = dict[str, Any]
OnSent = Callable[[int], None]


def upload(
    client: AdminClient, name: str, folder: Path, *, activate: bool, on_sent: OnSent, on_state: Callable[[str], None]
) -> Json:
    """The session once it is ready. Raises `AdminError`, with the report of a refused adapter.

    on_sent: called with the number of bytes sent, over both files.
    """
    paths = [folder / file for file in FILES]
    for path in paths:
        if not path.is_file():
            raise AdminError(f"{folder} has no {path.name}: give the folder that PEFT's save_pretrained wrote")
    sizes = [path.stat().st_size for path in paths]
    body = {
        "files": [{"name": path.name, "size_bytes": size} for path, size in zip(paths, sizes, strict=True)],
        "activate": activate,
    }
    session = client.post(f"/v1/adapters/{name}/uploads", body)
    num_sent = 0
    for path, size in zip(paths, sizes, strict=True):
        _send_file(client, session, path, size, lambda offset, before=num_sent: on_sent(before + offset))
        num_sent += size
    return _committed(client, session["id"], on_state)


def _send_file(client: AdminClient, session: Json, path: Path, size: int, on_offset: OnSent) -> None:
    offset, num_failures = 0, 0
    url = f"/v1/uploads/{session['id']}/files/{path.name}"
    with path.open("rb") as file:
        while offset < size:
            file.seek(offset)
            data = file.read(session["chunk_bytes"])
            try:
                content_range = f"bytes {offset}-{offset + len(data) - 1}/{size}"
                offset, num_failures = client.put_bytes(url, data, content_range)["offset"], 0
            except ConnectionLostError as error:
                num_failures += 1
                if num_failures == MAX_TRIES:
                    raise AdminError(str(error)) from error
                time.sleep(RETRY_S)
                offset = _received(client, session["id"], path.name)
            on_offset(offset)


def _received(client: AdminClient, upload_id: str, name: str) -> int:
    session = client.get(f"/v1/uploads/{upload_id}")
    return next(file["offset"] for file in session["files"] if file["name"] == name)


def _committed(client: AdminClient, upload_id: str, on_state: Callable[[str], None]) -> Json:
    session = client.post(f"/v1/uploads/{upload_id}/commit")
    while session["state"] in ("validating", "loading"):
        on_state(session["state"])
        session = client.get(f"/v1/uploads/{upload_id}", wait_s=WAIT_S)
    on_state(session["state"])
    if session["state"] == "rejected":
        raise AdminError("The adapter is refused.", session["report"])
    if session["state"] != "ready":
        raise AdminError(session["error"] or f"The upload is {session['state']}.")
    return session

"""The console's built files, as shipped in the package."""

import hashlib
import mimetypes
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

INDEX = "index.html"
HASHED_FOLDER = "assets/"
"""Vite includes a content hash in the names of these files."""

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class UiFile:
    content: bytes
    headers: dict[str, str]
    media_type: str


def read_ui_files() -> dict[str, UiFile]:
    """By path below /ui/. All are read once: together they are smaller than a single tensor of an adapter."""
    root = files("loraserve") / "static" / "ui"
    return {path: _ui_file(path, entry.read_bytes()) for path, entry in _walk(root, "")}


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    if not folder.is_dir():
        return []
    found: list[tuple[str, Traversable]] = []
    for entry in folder.iterdir():
        path = prefix + entry.name
        found += _walk(entry, f"{path}/") if entry.is_dir() else [(path, entry)]
    return found


def _ui_file(path: str, content: bytes) -> UiFile:
    media_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
    caching = "public, max-age=31536000, immutable" if path.startswith(HASHED_FOLDER) else "no-cache"
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return UiFile(content, {**SECURITY_HEADERS, "cache-control": caching, "etag": etag}, media_type)

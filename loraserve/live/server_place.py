"""Paths of the files and the socket of a data directory's private server."""

import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from loraserve.live.errors import LiveServerError

LONGEST_SOCKET_PATH = 103 if sys.platform == "darwin" else 107
"""Bytes; macOS allows 104 including the terminating zero, Linux 108."""
SOCKET_NAME = "kv.sock"


@dataclass(slots=True, frozen=True)
class ServerPlace:
    folder: Path
    socket: Path

    @property
    def lock(self) -> Path:
        return self.folder / "owner.lock"

    @property
    def runner_lock(self) -> Path:
        return self.folder / "runner.lock"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def url(self) -> str:
        return socket_url(str(self.socket))


def socket_url(path: str) -> str:
    """Characters with a meaning in URLs, such as `#`, are quoted."""
    return f"unix://{quote(path)}"


def prepare_place(data_dir: Path) -> ServerPlace:
    """Creates the folders (0700) and writes the socket's path to `kv/socket.path`. Raises LiveServerError."""
    folder = data_dir.resolve() / "kv"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    socket = folder / SOCKET_NAME
    if len(os.fsencode(socket)) > LONGEST_SOCKET_PATH:
        socket = _short_folder(folder) / SOCKET_NAME
    _note_path(folder / "socket.path", f"{socket}\n")
    return ServerPlace(folder, socket)


def _note_path(file: Path, text: str) -> None:
    """Writes only if the text differs, so that a server can start on a full disk."""
    with contextlib.suppress(FileNotFoundError):
        if file.read_text() == text:
            return
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(file)


def _short_folder(folder: Path) -> Path:
    """The same for every process of this user with this data directory, and private to this user."""
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    short = Path(runtime) / f"loraserve-{os.geteuid()}-{digest}"
    short.mkdir(mode=0o700, exist_ok=True)
    found = short.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o777 != 0o700:
        raise LiveServerError(
            f"{short} is not a folder that only this user can access (0700): remove it, or set XDG_RUNTIME_DIR"
        )
    if len(os.fsencode(short / SOCKET_NAME)) > LONGEST_SOCKET_PATH:
        raise LiveServerError(
            f"{short / SOCKET_NAME} is longer than {LONGEST_SOCKET_PATH} bytes: set XDG_RUNTIME_DIR to a shorter path, "
            "or use a data directory with one"
        )
    return short


def set_data_aside(place: ServerPlace) -> None:
    """Moves the data files to `unreadable`, replacing those set aside earlier."""
    aside = place.folder / "unreadable"
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(mode=0o700)
    for name in ("appendonlydir", "appendonly.aof", "dump.rdb"):
        if (place.folder / name).exists():
            (place.folder / name).rename(aside / name)

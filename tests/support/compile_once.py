"""A C compiler that caches its objects: `python compile_once.py FOLDER COMPILER ARGUMENTS…`.

An object is identified by its preprocessed source, the flags and the compiler. The tests' libraries have many objects
in common, with each other and from one run of pytest to the next.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

UNUSED_S = 7 * 24 * 3600.0


def main(folder: Path, command: list[str]) -> int:
    if "-c" in command:
        options, source = command[: command.index("-c")], command[-1]
        preprocessed = subprocess.run([*options, "-E", "-P", source], capture_output=True, check=False)
        if preprocessed.returncode == 0:
            kept = folder / f"{key(options, preprocessed.stdout)}.o"
            return compile_once(kept, command, Path(f"{Path(source).stem}.o"))
    return subprocess.run(command, check=False).returncode


def key(options: list[str], preprocessed: bytes) -> str:
    compiler = os.path.realpath(shutil.which(options[0]) or options[0])
    status = os.stat(compiler)
    flags = [option for option in options[1:] if not option.startswith("-D")]  # the preprocessor has used the others
    named = "\0".join((compiler, str(status.st_size), str(status.st_mtime_ns), *flags)).encode()
    return hashlib.sha256(named + b"\0" + preprocessed).hexdigest()[:32]


def compile_once(kept: Path, command: list[str], result: Path) -> int:
    """result: the object in the working directory, where the compiler writes it."""
    kept.parent.mkdir(exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists():
            kept.touch()
            shutil.copyfile(kept, result)
            return 0
        code = subprocess.run(command, check=False).returncode
        if code == 0:
            remove_unused(kept.parent)
            shutil.copyfile(result, kept.with_suffix(".new"))
            os.replace(kept.with_suffix(".new"), kept)
        return code


def remove_unused(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - UNUSED_S:
                path.unlink()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

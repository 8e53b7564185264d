"""Who writes into a data directory: only files of the user that runs its server can be read by that server."""

import contextlib
import os
import pwd
import shlex
from collections.abc import Iterator
from pathlib import Path

import rich_click as click

ROOT = 0


@contextlib.contextmanager
def acting_as_owner(data_dir: Path) -> Iterator[None]:
    """What is made inside is of the user whose documents are there; root acts as that user for so long.

    Raises `click.ClickException` for another user, who could not make what the server can read.

    NOTE: nothing is imported inside: that user may not be let into the folders where the packages are.
    """
    place = next((folder for folder in (data_dir / "docs", data_dir) if os.path.exists(folder)), None)
    if place is None:
        yield
        return
    owner, caller_uid, caller_gid = place.stat(), os.geteuid(), os.getegid()
    # Where everything is everybody's, as on some shared file systems, an owner says nothing.
    if owner.st_uid == caller_uid or (caller_uid != ROOT and os.access(place, os.R_OK | os.W_OK | os.X_OK)):
        yield
        return
    try:
        os.setegid(owner.st_gid)
        os.seteuid(owner.st_uid)
    except PermissionError:
        raise _refusal(data_dir, owner.st_uid, caller_uid) from None
    try:
        yield
    finally:
        os.seteuid(caller_uid)
        os.setegid(caller_gid)


def _refusal(data_dir: Path, owner_uid: int, caller_uid: int) -> click.ClickException:
    owner, caller = _user(owner_uid), _user(caller_uid)
    return click.ClickException(
        f"--data-dir {data_dir} is of the user {owner}, and what {caller} writes there its server cannot read: "
        f"run the command as {owner}, with `sudo -u {shlex.quote(owner)}`"
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"

"""Makes commands write to a data directory as its owner: a server can read only files of the user that runs it."""

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
    """Files created inside belong to the owner of the directory's documents: root acts as that user meanwhile.

    Raises `click.ClickException` for other users, because the server could not read their files.

    NOTE: import nothing inside: the owner may have no access to the folders of the packages.
    """
    place = next((folder for folder in (data_dir / "docs", data_dir) if os.path.exists(folder)), None)
    if place is None:
        yield
        return
    owner, caller_uid, caller_gid = place.stat(), os.geteuid(), os.getegid()
    # If this user has full access, as on some shared file systems, the owner does not matter.
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
        f"--data-dir {data_dir} belongs to {owner}, whose server could not read files written by {caller}: "
        f"run the command as {owner}, with `sudo -u {shlex.quote(owner)}`"
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"

"""Files that commands of root and of other users leave in the data directory of a server with its own user."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraserve.control.tenancy.offline_keys import create_key_offline
from loraserve.store.documents import DocumentStore
from loraserve.store.records import ANY_TENANT, DocumentKind, Role

OWNER, OTHER = 41_234, 41_235
"""Unused user and group ids."""

COMMAND = """
import os, sys
sys.path[:0] = {path!r}
from pathlib import Path
import rich_click as click
from loraserve.cli.admin.offline_keys import create_offline, revoke_offline
import pwd
os.setgroups([])
os.setgid({uid})
os.setuid({uid})
known = {{*sys.modules}}
data_dir = Path({data_dir!r})
BODY = {{"role": "admin", "tenant": None, "name": "", "adapters": None, "limits": {{}}, "expires_in_s": None}}
try:
    {code}
except click.ClickException as error:
    sys.exit(error.message)
assert (os.geteuid(), os.getegid()) == ({uid}, {uid})
print(*({{*sys.modules}} - known), file=sys.stderr)
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """An empty directory that belongs to OWNER, in a folder that every user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        made = Path(folder) / "data"
        made.mkdir(mode=0o700)
        os.chown(made, OWNER, OWNER)
        yield made


def run_as(uid: int, data_dir: Path, code: str) -> "subprocess.CompletedProcess[str]":
    text = COMMAND.format(path=[entry for entry in sys.path if entry], uid=uid, data_dir=str(data_dir), code=code)
    words = [sys.executable, "-c", text]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def created(uid: int, data_dir: Path) -> str:
    """The id of a key created by this user's command."""
    done = run_as(uid, data_dir, "print(create_offline(data_dir, BODY)['id'])")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def owners_key(data_dir: Path) -> str:
    """The id of a key created by the owner of the directory."""
    issued = create_key_offline(DocumentStore(data_dir), role=Role.ADMIN, tenant=ANY_TENANT)
    for path in data_dir.rglob("*"):
        os.chown(path, OWNER, OWNER)
    return issued.document.id


def assert_all_is_the_owners(data_dir: Path) -> None:
    found = [data_dir, *data_dir.rglob("*")]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in found} == {(OWNER, OWNER)}


def test_files_that_root_writes_belong_to_the_owner_of_the_directory(data_dir: Path) -> None:
    key = created(0, data_dir)
    assert_all_is_the_owners(data_dir)
    assert run_as(0, data_dir, f"revoke_offline(data_dir, {key!r})").returncode == 0
    assert_all_is_the_owners(data_dir)
    document = DocumentStore(data_dir).get(DocumentKind.KEY, key)
    assert document is not None
    assert document.rev == 2


def test_root_writes_as_the_owner_of_the_documents_if_the_volume_belongs_to_another_user(data_dir: Path) -> None:
    owners_key(data_dir)
    os.chown(data_dir, 0, OWNER)
    data_dir.chmod(0o2770)
    created(0, data_dir)
    os.chown(data_dir, OWNER, OWNER)
    assert_all_is_the_owners(data_dir)


def test_a_login_link_created_by_root_leaves_no_files_of_root(data_dir: Path) -> None:
    key = owners_key(data_dir)
    (data_dir / "docs" / "trash").rmdir()
    found = run_as(0, data_dir, "from loraserve.cli.admin import ui_links; print(ui_links._key(data_dir, None).id)")
    assert found.stdout.strip() == key, found.stderr
    assert_all_is_the_owners(data_dir)


def test_root_imports_no_modules_while_it_acts_as_another_user(data_dir: Path) -> None:
    """The other user may have no access to root's folders, where the packages may be installed."""
    done = run_as(0, data_dir, "revoke_offline(data_dir, create_offline(data_dir, BODY)['id'])")
    assert (done.returncode, done.stderr) == (0, "\n")


@pytest.mark.parametrize("has_documents", [False, True])
def test_another_user_gets_an_error_that_names_the_owner_of_the_directory(data_dir: Path, has_documents: bool) -> None:
    if has_documents:
        owners_key(data_dir)
        data_dir.chmod(0o755)
    done = run_as(OTHER, data_dir, "create_offline(data_dir, BODY)")
    assert done.returncode == 1
    assert f"belongs to #{OWNER}, whose server could not read files written by #{OTHER}" in done.stderr
    assert f"sudo -u '#{OWNER}'" in done.stderr


def test_a_user_can_be_the_first_to_write_into_a_volume_of_another_user(data_dir: Path) -> None:
    """A volume as Kubernetes creates it: owned by root, with the group of the user that runs in the pod."""
    os.chown(data_dir, 0, OTHER)
    data_dir.chmod(0o2770)
    created(OTHER, data_dir)
    created(OTHER, data_dir)

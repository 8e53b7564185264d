"""What commands of root and of other users leave in the data directory of a server that runs as its own user."""

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
"""User and group ids that nobody has."""

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
    """Of a user, who has made nothing in it yet; in a folder that everybody is let into, unlike pytest's."""
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
    """The id of a key that this user's command made."""
    done = run_as(uid, data_dir, "print(create_offline(data_dir, BODY)['id'])")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def owners_key(data_dir: Path) -> str:
    """The id of a key that its owner has made."""
    issued = create_key_offline(DocumentStore(data_dir), role=Role.ADMIN, tenant=ANY_TENANT)
    for path in data_dir.rglob("*"):
        os.chown(path, OWNER, OWNER)
    return issued.document.id


def assert_all_is_the_owners(data_dir: Path) -> None:
    found = [data_dir, *data_dir.rglob("*")]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in found} == {(OWNER, OWNER)}


def test_what_root_makes_and_revokes_is_of_the_directorys_owner(data_dir: Path) -> None:
    key = created(0, data_dir)
    assert_all_is_the_owners(data_dir)
    assert run_as(0, data_dir, f"revoke_offline(data_dir, {key!r})").returncode == 0
    assert_all_is_the_owners(data_dir)
    document = DocumentStore(data_dir).get(DocumentKind.KEY, key)
    assert document is not None
    assert document.rev == 2


def test_root_writes_as_who_has_the_documents_where_a_volume_is_of_another(data_dir: Path) -> None:
    owners_key(data_dir)
    os.chown(data_dir, 0, OWNER)
    data_dir.chmod(0o2770)
    created(0, data_dir)
    os.chown(data_dir, OWNER, OWNER)
    assert_all_is_the_owners(data_dir)


def test_a_link_that_root_makes_leaves_nothing_of_roots(data_dir: Path) -> None:
    key = owners_key(data_dir)
    (data_dir / "docs" / "trash").rmdir()
    found = run_as(0, data_dir, "from loraserve.cli.admin import ui_links; print(ui_links._key(data_dir, None).id)")
    assert found.stdout.strip() == key, found.stderr
    assert_all_is_the_owners(data_dir)


def test_root_imports_nothing_while_it_is_somebody_else(data_dir: Path) -> None:
    """Who may not be let into root's folders, where the packages may be."""
    done = run_as(0, data_dir, "revoke_offline(data_dir, create_offline(data_dir, BODY)['id'])")
    assert (done.returncode, done.stderr) == (0, "\n")


@pytest.mark.parametrize("has_documents", [False, True])
def test_another_user_is_told_whose_the_directory_is(data_dir: Path, has_documents: bool) -> None:
    if has_documents:
        owners_key(data_dir)
        data_dir.chmod(0o755)
    done = run_as(OTHER, data_dir, "create_offline(data_dir, BODY)")
    assert done.returncode == 1
    assert f"belongs to #{OWNER}, whose server could not read files written by #{OTHER}" in done.stderr
    assert f"sudo -u '#{OWNER}'" in done.stderr


def test_a_user_may_write_first_into_a_volume_of_another(data_dir: Path) -> None:
    """As Kubernetes makes them: of root, for the group of who runs there."""
    os.chown(data_dir, 0, OTHER)
    data_dir.chmod(0o2770)
    created(OTHER, data_dir)
    created(OTHER, data_dir)

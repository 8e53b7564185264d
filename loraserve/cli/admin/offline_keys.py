"""Creates and revokes keys in a data directory, whether or not a server runs on it."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import rich_click as click

from loraserve.api.management.key_items import created_key
from loraserve.cli.admin.data_owner import acting_as_owner
from loraserve.control.tenancy.offline_keys import create_key_offline, revoke_key_offline
from loraserve.serving.errors import ServingError
from loraserve.store.documents import DocumentStore
from loraserve.store.errors import StoreError
from loraserve.store.records import ANY_TENANT, DEFAULT_TENANT, Limits, Role


def create_offline(data_dir: Path, body: dict[str, Any]) -> dict[str, Any]:
    """body: that of POST /v1/keys. Returns what that route would."""
    role = Role(body["role"])
    expires_in_s = body["expires_in_s"]
    limits = msgspec.convert(body["limits"], Limits)
    with _opened(data_dir) as documents:
        issued = create_key_offline(
            documents,
            role=role,
            tenant=body["tenant"] or (ANY_TENANT if role is Role.ADMIN else DEFAULT_TENANT),
            name=body["name"],
            adapters=body["adapters"],
            limits=limits,
            expires_at=None if expires_in_s is None else time.time() + expires_in_s,
        )
    return msgspec.to_builtins(created_key(issued))


def revoke_offline(data_dir: Path, key_id: str) -> None:
    with _opened(data_dir) as documents:
        revoke_key_offline(documents, key_id)


@contextlib.contextmanager
def _opened(data_dir: Path) -> Iterator[DocumentStore]:
    """Inside, errors of the directory become a one-line `click.ClickException`."""
    folder = data_dir.expanduser()
    try:
        with acting_as_owner(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            yield DocumentStore(folder)
    except ServingError as error:
        raise click.ClickException(error.message) from error
    except StoreError as error:
        raise click.ClickException(f"{error}. Try again.") from error
    except OSError as error:
        raise click.ClickException(f"--data-dir {data_dir} cannot be used: {error.strerror}") from error

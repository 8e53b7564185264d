"""Keys in a data directory, with or without a server that runs on it."""

import time
from pathlib import Path
from typing import Any

import msgspec
import rich_click as click

from loraserve.api.management.key_items import created_key
from loraserve.control.tenancy.offline_keys import create_key_offline, revoke_key_offline
from loraserve.serving.errors import ServingError
from loraserve.store.documents import DocumentStore
from loraserve.store.errors import StoreError
from loraserve.store.records import ANY_TENANT, DEFAULT_TENANT, Limits, Role


def create_offline(data_dir: Path, body: dict[str, Any]) -> dict[str, Any]:
    """body: as POST /v1/keys takes it. What that would answer."""
    role = Role(body["role"])
    expires_in_s = body["expires_in_s"]
    try:
        issued = create_key_offline(
            _documents(data_dir),
            role=role,
            tenant=body["tenant"] or (ANY_TENANT if role is Role.ADMIN else DEFAULT_TENANT),
            name=body["name"],
            adapters=body["adapters"],
            limits=msgspec.convert(body["limits"], Limits),
            expires_at=None if expires_in_s is None else time.time() + expires_in_s,
        )
    except ServingError as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        raise _unusable(data_dir, error) from error
    return msgspec.to_builtins(created_key(issued))


def revoke_offline(data_dir: Path, key_id: str) -> None:
    try:
        revoke_key_offline(_documents(data_dir), key_id)
    except ServingError as error:
        raise click.ClickException(error.message) from error
    except StoreError as error:
        raise click.ClickException(f"{error}. Try again.") from error
    except OSError as error:
        raise _unusable(data_dir, error) from error


def _documents(data_dir: Path) -> DocumentStore:
    try:
        data_dir.expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)
        return DocumentStore(data_dir.expanduser())
    except OSError as error:
        raise _unusable(data_dir, error) from error


def _unusable(data_dir: Path, error: OSError) -> click.ClickException:
    return click.ClickException(f"--data-dir {data_dir} cannot be used: {error.strerror}")

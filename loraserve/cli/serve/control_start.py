"""The data directory, Redis and what is declared there, opened for a server; and the adapters of its command line."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path

from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.chat_template import other_chat_template
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import Limits
from loraserve_adapters.source import read_adapter

from loraserve.cli.serve.banner import shown_names
from loraserve.cli.serve.option_types import LoraModule
from loraserve.cli.serve.settings import ServeSettings
from loraserve.cli.serve.start_error import StartError
from loraserve.control.control_plane import ControlPlane
from loraserve.control.declared import ControlSettings, Declared, open_declared
from loraserve.control.documents.adapter_edits import live_version
from loraserve.control.tenancy.principal import server_principal
from loraserve.control.uploads.source import FollowLinks
from loraserve.live.errors import LiveError
from loraserve.live.private_server import PrivateServer
from loraserve.serving.errors import ServingError
from loraserve.store.errors import StoreError
from loraserve.store.known_sources import KnownSources
from loraserve.store.records import SHARED_TENANT

CONFIG_ACTOR = "config"
"""Who published what the command line names."""
PUBLISHED_AT_ONCE = 8
"""Enough to keep the processes that check them busy, far fewer than the uploads a tenant may have open."""


@contextlib.asynccontextmanager
async def opened_declared(settings: ServeSettings) -> AsyncGenerator[Declared]:
    """With a Redis of its own unless there is --redis-url. Enter it in `start_errors`."""
    settings.data_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        url = settings.redis_url or (await stack.enter_async_context(PrivateServer(settings.data_path))).url
        declared = await open_declared(_control_settings(settings, url))
        stack.push_async_callback(declared.live.close)
        _check_reachable_only_with_admin(settings, declared)
        yield declared


@contextlib.contextmanager
def start_errors(settings: ServeSettings) -> Generator[None]:
    """What is wrong with the data directory or Redis becomes a `StartError`. Not for what goes wrong later."""
    try:
        yield
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error
        raise StartError(f"--data-dir {settings.data_path} cannot be used: {reason}") from error
    except (LiveError, StoreError) as error:
        raise StartError(str(error)) from error


def _control_settings(settings: ServeSettings, redis_url: str) -> ControlSettings:
    return ControlSettings(
        data_dir=settings.data_path,
        redis_url=redis_url,
        redis_prefix=settings.redis_prefix,
        redis_grace_s=settings.redis_grace_s,
        base_names=list(settings.model_names),
        flag_keys=list(settings.api_key),
        keep_versions=settings.keep_versions,
        max_queued=settings.max_queued,
        max_queued_per_tenant=settings.max_queued_per_tenant,
    )


def _check_reachable_only_with_admin(settings: ServeSettings, declared: Declared) -> None:
    if settings.is_on_loopback or declared.authenticator.has_admin:
        return
    raise StartError(
        f"on {settings.bind_host} other machines can reach the server, and it has no admin key. Make one with "
        f"`loraserve keys create --role admin --data-dir {settings.data_path}`, or use --host 127.0.0.1"
    )


async def publish_configured(
    control: ControlPlane,
    adapters: Sequence[LoraModule],
    layout: BaseLayout,
    limits: Limits,
    on_progress: Callable[[int], None],
) -> None:
    """Each is what its name means for all tenants afterwards. Raises `StartError`.

    What is there already is only read, and not even that if its files are those of an earlier start. on_progress:
    called with the number that are done.
    """
    num_done = 0
    pending = iter(adapters)
    known = KnownSources(control.declared.settings.data_dir, f"{layout.fingerprint} {limits}")

    async def publish_next() -> None:
        nonlocal num_done
        for adapter in pending:
            await _publish(control, adapter, layout, limits, known)
            num_done += 1
            on_progress(num_done)

    results = await asyncio.gather(*(publish_next() for _ in range(PUBLISHED_AT_ONCE)), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    with contextlib.suppress(OSError):
        await asyncio.to_thread(known.save)


async def _publish(
    control: ControlPlane, adapter: LoraModule, layout: BaseLayout, limits: Limits, known: KnownSources
) -> None:
    try:
        digest = await asyncio.to_thread(_digest, adapter.path, layout, limits, known)
        if _is_live(control, adapter.name, digest):
            return
        await control.uploads.from_path(
            server_principal(SHARED_TENANT, CONFIG_ACTOR),
            "",
            adapter.name,
            adapter.path,
            roots=None,
            follow_links=FollowLinks.ALWAYS,
        )
    except (AdapterError, ServingError) as error:
        raise StartError(f"adapter {adapter.name!r} from {adapter.path}: {error.message}") from error
    except OSError as error:
        raise StartError(f"adapter {adapter.name!r} from {adapter.path}: {error.strerror}") from error


def _digest(folder: Path, layout: BaseLayout, limits: Limits, known: KnownSources) -> str:
    """Of its content. Raises `AdapterError`."""
    if (digest := known.digest(folder)) is not None:
        return digest
    states = known.begin(folder)
    digest = read_adapter(folder, layout, limits).digest
    if states is not None:
        known.remember(folder, states, digest)
    return digest


def notes_on_chat_templates(adapters: Sequence[LoraModule], served: str | None) -> list[str]:
    """At most one: which of them were saved with a chat template that is not used."""
    names = [adapter.name for adapter in adapters if other_chat_template(adapter.path, served) is not None]
    reason = "chats are rendered with the base model's chat template, not with the other one beside the adapter"
    return [f"{reason}: {shown_names(names)}"] if names else []


def _is_live(control: ControlPlane, name: str, digest: str) -> bool:
    document = control.catalog.adapter(SHARED_TENANT, name)
    if document is None or document.doc.deleted_at is not None:
        return False
    live = live_version(document.doc)
    return live is not None and live.digest == digest and control.adapters.fits(live)

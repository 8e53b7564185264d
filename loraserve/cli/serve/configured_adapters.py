"""Publishes the adapters of the command line: once published, an adapter has its name for all tenants."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.chat_template import other_chat_template
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.source import read_adapter

from loraserve.cli.serve.banner import shown_names
from loraserve.cli.serve.option_types import LoraModule
from loraserve.cli.serve.settings import adapter_folders
from loraserve.cli.serve.start_error import StartError
from loraserve.control.control_plane import ControlPlane
from loraserve.control.documents.adapter_edits import live_version
from loraserve.control.tenancy.principal import server_principal
from loraserve.control.uploads.source import FollowLinks
from loraserve.serving.errors import SERVER_FAULTS, ErrorCode, ServingError
from loraserve.store.known_sources import KnownSources, States, states_of
from loraserve.store.records import SHARED_TENANT

CONFIG_ACTOR = "config"
"""Publisher of the command line's adapters, for the audit trail."""
PUBLISHED_AT_ONCE = 8
"""Enough to keep the checking processes busy, and far fewer than a tenant's maximum number of open uploads."""

_PASSING = SERVER_FAULTS | {ErrorCode.INSUFFICIENT_QUOTA}
"""Errors that may be gone at the next try."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an adapter was not published."""

    adapter: LoraModule
    error: AdapterError | ServingError | OSError

    def __str__(self) -> str:
        reason = self.error.strerror if isinstance(self.error, OSError) else self.error.message
        return f"adapter {self.adapter.name!r} from {self.adapter.path}: {reason}"

    @property
    def may_pass(self) -> bool:
        """Whether the next try may succeed although the files are the same."""
        return isinstance(self.error, OSError) or (isinstance(self.error, ServingError) and self.error.code in _PASSING)


class ConfiguredAdapters:
    def __init__(self, control: ControlPlane, layout: BaseLayout) -> None:
        self._control = control
        self._layout = layout
        settings = control.declared.settings
        self._limits = settings.adapter_rules.limits
        self._known = KnownSources(settings.data_dir, f"{layout.fingerprint} {self._limits}")

    async def publish(
        self, named: Sequence[LoraModule], found: Sequence[LoraModule], on_progress: Callable[[int], None]
    ) -> list[Refusal]:
        """Adapters that are already published are only read, and not even that if their files are unchanged.

        on_progress: called with the number of finished adapters. Found adapters that are refused are logged and
        returned. Raises `StartError` for the first named one that fails; those that are being published then are
        finished, and no others are begun: thousands can take minutes.
        """
        num_done = 0
        has_failed = False
        refusals: list[Refusal] = []
        pending = iter([*((adapter, True) for adapter in named), *((adapter, False) for adapter in found)])

        async def publish_next() -> None:
            nonlocal has_failed, num_done
            while not has_failed and (entry := next(pending, None)) is not None:
                adapter, is_named = entry
                refusal = await self.try_publish(adapter)
                if refusal is not None and is_named:
                    has_failed = True
                    raise StartError(str(refusal)) from refusal.error
                if refusal is not None:
                    _logger.warning("%s", refusal)
                    refusals.append(refusal)
                num_done += 1
                on_progress(num_done)

        try:
            results = await asyncio.gather(*(publish_next() for _ in range(PUBLISHED_AT_ONCE)), return_exceptions=True)
        finally:
            await self.save()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return refusals

    async def try_publish(self, adapter: LoraModule) -> Refusal | None:
        """None if it is published."""
        try:
            await self._publish(adapter)
        except (AdapterError, ServingError, OSError) as error:
            return Refusal(adapter, error)
        return None

    async def save(self) -> None:
        """Records the digests of folders, so that a restart need not read them again."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._known.save)

    async def _publish(self, adapter: LoraModule) -> None:
        """Raises `AdapterError`, `ServingError`, `OSError`."""
        digest = await asyncio.to_thread(self._digest, adapter.path)
        if self._is_live(adapter.name, digest):
            return
        await self._control.uploads.from_path(
            server_principal(SHARED_TENANT, CONFIG_ACTOR),
            "",
            adapter.name,
            adapter.path,
            roots=None,
            follow_links=FollowLinks.ALWAYS,
        )

    def _digest(self, folder: Path) -> str:
        """Digest of the folder's content. Raises `AdapterError`."""
        if (digest := self._known.digest(folder)) is not None:
            return digest
        states = self._known.begin(folder)
        digest = read_adapter(folder, self._layout, self._limits).digest
        if states is not None:
            self._known.remember(folder, states, digest)
        return digest

    def _is_live(self, name: str, digest: str) -> bool:
        document = self._control.catalog.adapter(SHARED_TENANT, name)
        if document is None or document.doc.deleted_at is not None:
            return False
        live = live_version(document.doc)
        return live is not None and live.digest == digest and self._control.adapters.fits(live)


class AdapterDirWatch:
    """Publishes folders that are added to `--adapter-dir`, or change there, while the server runs.

    Each state of a folder is published once: an adapter that is deleted or rolled back later stays so until its folder
    changes.
    """

    def __init__(self, folder: Path, configured: ConfiguredAdapters) -> None:
        """Reads the folder. Adapters that are in it now are left to `ConfiguredAdapters.publish`."""
        self._folder = folder
        self._configured = configured
        self._before = _states_below(folder)
        self._done = dict(self._before)
        """Includes folders that have disappeared: they may return unchanged, for example with the disk they are on."""
        self._complaints: dict[LoraModule, str] = {}
        """Last logged error of each adapter that is tried again."""

    async def scan(self) -> None:
        """Publishes changed adapters whose files are the same as at the last scan, so that none is read while written.

        A refused adapter is logged once and ignored until its files change. Temporary errors, such as a full disk, are
        tried again.
        """
        before, found = self._before, await asyncio.to_thread(_states_below, self._folder)
        self._before = found
        changed = {
            adapter: states
            for adapter, states in found.items()
            if before.get(adapter) == states and self._done.get(adapter) != states
        }
        if not changed:
            return
        try:
            for adapter, states in changed.items():
                if await self._publish(adapter):
                    self._done[adapter] = states
        finally:
            # Once, since it writes all known digests: with 10,000 it would take longer than publishing an adapter.
            await self._configured.save()

    def retry(self, refusals: Iterable[Refusal]) -> None:
        """Tries those again that failed at the start and may pass, even if their files are unchanged."""
        for refusal in refusals:
            if refusal.may_pass:
                self._done.pop(refusal.adapter, None)
                self._complaints[refusal.adapter] = str(refusal)

    async def _publish(self, adapter: LoraModule) -> bool:
        """False if it is to be tried again."""
        refusal = await self._configured.try_publish(adapter)
        if refusal is not None:
            complaint = str(refusal)
            if self._complaints.get(adapter) != complaint:
                _logger.warning("%s", complaint)
            if refusal.may_pass:
                self._complaints[adapter] = complaint
                return False
        self._complaints.pop(adapter, None)
        return True


def _states_below(folder: Path) -> dict[LoraModule, States]:
    """Adapters that have both files."""
    states = {adapter: states_of(adapter.path) for adapter in adapter_folders(folder)}
    return {adapter: found for adapter, found in states.items() if found is not None}


def notes_on_chat_templates(adapters: Sequence[LoraModule], served: str | None) -> list[str]:
    """At most one note, on adapters that were saved with a chat template that is not used."""
    names = [adapter.name for adapter in adapters if other_chat_template(adapter.path, served) is not None]
    reason = "chats are rendered with the base model's chat template, not with those saved with these adapters"
    return [f"{reason}: {shown_names(names)}"] if names else []


def notes_on_refusals(refusals: Sequence[Refusal], num_found: int) -> list[str]:
    """At most one note. num_found: adapters in --adapter-dir, including those refused."""
    names = [repr(refusal.adapter.name) for refusal in refusals]
    told = f"{len(refusals)} of {num_found} folders in --adapter-dir refused, for reasons in the log"
    return [f"{told}: {shown_names(names)}"] if names else []

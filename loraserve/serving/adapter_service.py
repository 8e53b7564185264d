"""Adapters are validated and known to the engine before they are visible, and invisible before they are gone."""

import asyncio
import contextlib
import dataclasses
import errno
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Protocol

from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import DEFAULT_LIMITS, Limits
from loraserve_adapters.pack import load_and_pack
from loraserve_adapters.packed import PackedAdapter
from loraserve_adapters.packed_file import packed_file_name

from loraserve.serving.engine_client import AdapterLoadError, EngineClient, EngineDeadError
from loraserve.serving.engine_errors import engine_dead
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.registry import ADAPTER_NAME, AdapterRegistry, ResolvedAdapter
from loraserve.serving.turns import Turns


class Packer(Protocol):
    """See `loraserve_adapters.pack.load_and_pack`."""

    def __call__(self, folder: Path, layout: BaseLayout, cache_dir: Path, *, limits: Limits) -> PackedAdapter: ...


class AdapterService:
    """Called on the event loop. Calls for one name, and for one content, take turns; others do not wait for them."""

    def __init__(
        self,
        engine: EngineClient,
        registry: AdapterRegistry,
        *,
        base_names: list[str],
        packed_dir: Path,
        on_removed: Callable[[str], None],
        limits: Limits = DEFAULT_LIMITS,
        unload_timeout_s: float = 30.0,
        packer: Packer = load_and_pack,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._base_names = base_names
        self._packed_dir = packed_dir
        self._on_removed = on_removed
        self._limits = limits
        self._unload_timeout_s = unload_timeout_s
        self._packer = packer
        self._turns = Turns()
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(
        self, name: str, path: Path, *, replace: bool = False, follow_symlinks: bool = False
    ) -> ResolvedAdapter:
        """Validate, pack, load, and only then make it visible. Raises `ServingError`.

        follow_symlinks: only for paths of the command line, since Hugging Face's cache is made of symbolic links. Never
        for a client's: a link in its folder would make us read files that it may not.
        replace: an adapter of this name is exchanged at once; requests that run with the old one finish with it.
        """
        self._check_name(name)
        async with self._turns.take(f"name {name}"):
            old = self._registry.resolve(name)
            if old is not None and not replace:
                message = f"The lora adapter '{name}' has already been loaded. Set load_inplace to replace it."
                raise ServingError(ErrorCode.ADAPTER_ALREADY_LOADED, message, param="lora_name")
            packed = await self._pack(path, dataclasses.replace(self._limits, follow_symlinks=follow_symlinks))
            adapter = ResolvedAdapter(name, packed.digest, packed.max_lora_rank, packed.size_bytes)
            async with self._turns.take(f"digest {packed.digest}"):
                await self._load(packed)
                self._registry.add(adapter)
        if old is not None and old.digest != adapter.digest:
            await self._unload(old.digest)
        return adapter

    async def remove(self, name: str) -> ResolvedAdapter:
        """Invisible at once; returns when the engine has forgotten it, or `unload_timeout_s` is over.

        Raises `ServingError`.
        """
        async with self._turns.take(f"name {name}"):
            adapter = self._registry.remove(name)
        if adapter is None:
            raise adapter_not_found(name)
        self._on_removed(name)
        await self._unload(adapter.digest)
        return adapter

    def _check_name(self, name: str) -> None:
        if not ADAPTER_NAME.fullmatch(name):
            message = f"'lora_name' is {name!r}; it must match {ADAPTER_NAME.pattern}."
            raise ServingError(ErrorCode.INVALID_VALUE, message, param="lora_name")
        if name in self._base_names:
            message = f"'lora_name' is {name!r}, which is the base model's name."
            raise ServingError(ErrorCode.INVALID_VALUE, message, param="lora_name")

    async def _pack(self, path: Path, limits: Limits) -> PackedAdapter:
        if not await asyncio.to_thread(_is_folder, path):
            message = f"Loading lora failed: there is no adapter folder at '{path}'."
            raise ServingError(ErrorCode.ADAPTER_NOT_FOUND, message, param="lora_path")
        try:
            return await asyncio.to_thread(
                self._packer, path, self._engine.model.layout, self._packed_dir, limits=limits
            )
        except AdapterError as error:
            code = ErrorCode.ADAPTER_NOT_FOUND if error.code == "missing_file" else ErrorCode.ADAPTER_INVALID
            raise ServingError(code, f"Loading lora failed: {error.message}", param="lora_path") from error
        except OSError as error:
            reason = "no space is left" if error.errno == errno.ENOSPC else "the data directory cannot be written"
            raise ServingError(ErrorCode.INTERNAL_ERROR, f"Loading lora failed: {reason}.") from error

    async def _load(self, packed: PackedAdapter) -> None:
        if self._registry.has_digest(packed.digest):
            return
        packed_path = self._packed_dir / packed_file_name(packed.digest, self._engine.model.layout)
        try:
            await self._engine.load(packed.digest, str(packed_path))
        except AdapterLoadError as error:
            raise ServingError(ErrorCode.ADAPTER_INVALID, f"Loading lora failed: {error}") from error
        except EngineDeadError as error:
            raise engine_dead() from error

    async def _unload(self, digest: str) -> None:
        """Goes on in the background when the caller stops waiting; the content's turn keeps a new load behind it."""
        task = self._spawn(self._unload_in_turn(digest))
        await asyncio.wait({task}, timeout=self._unload_timeout_s)

    async def _unload_in_turn(self, digest: str) -> None:
        async with self._turns.take(f"digest {digest}"):
            if self._registry.has_digest(digest):
                return
            with contextlib.suppress(EngineDeadError):
                await self._engine.unload(digest)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        # Such as a name that is too long.
        return False


def adapter_not_found(name: str) -> ServingError:
    return ServingError(ErrorCode.ADAPTER_NOT_FOUND, f"The lora adapter '{name}' cannot be found.", param="lora_name")

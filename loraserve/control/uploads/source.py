"""An adapter folder on this machine, opened so that neither its path nor a link in it leads out of allowed folders."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from loraserve_adapters.config import CONFIG_NAME
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.files import open_below, open_regular
from loraserve_adapters.limits import AdapterLimits
from loraserve_adapters.safetensors_file import WEIGHTS_NAME, open_weights_descriptor

from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.upload_session import CHUNK_BYTES, UploadFile


class FollowLinks(Enum):
    """Which links in a folder that may be anywhere are followed, wherever they lead."""

    NEVER = auto()
    IN_OWN_FOLDERS = auto()
    """In folders of the user this process runs as: another user's link could lead to what only we may read."""
    ALWAYS = auto()


@dataclass(frozen=True, slots=True)
class UploadSource:
    files: list[UploadFile]
    descriptors: dict[str, int]

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """The file in blocks, up to its size when it was opened; ends early if it has become shorter."""
        size = next(file.size_bytes for file in self.files if file.name == name)
        position = 0
        while position < size:
            block = await asyncio.to_thread(
                os.pread, self.descriptors[name], min(CHUNK_BYTES, size - position), position
            )
            if not block:
                return
            position += len(block)
            yield block


@contextmanager
def open_source(
    path: Path, *, roots: Sequence[Path] | None, follow_links: FollowLinks, limits: AdapterLimits
) -> Iterator[UploadSource]:
    """Opens both files; briefly blocks on the disk. Raises `ServingError`.

    roots: given without links. The folder, with links on its path resolved, must be one of them or below one, and so
    must the files that links in it lead to; None = anywhere. follow_links: links in the folder to follow as well.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(_opened_folder(path, roots))
        follow_symlinks = _may_follow(folder, follow_links)
        limits = replace(limits, follow_symlinks=follow_symlinks, link_roots=tuple(map(str, roots or ())))
        try:
            config = stack.enter_context(open_regular(folder, CONFIG_NAME, limits))
            weights = stack.enter_context(open_weights_descriptor(folder, limits))
        except AdapterError as error:
            code = ErrorCode.ADAPTER_NOT_FOUND if error.code == "missing_file" else ErrorCode.ADAPTER_INVALID
            raise ServingError(code, f"Loading lora failed: {error.message}.", param="lora_path") from None
        opened = {CONFIG_NAME: config, WEIGHTS_NAME: weights}
        yield UploadSource(
            [UploadFile(name=name, size_bytes=size) for name, (_, size) in opened.items()],
            {name: descriptor for name, (descriptor, _) in opened.items()},
        )


@contextmanager
def _opened_folder(path: Path, roots: Sequence[Path] | None) -> Iterator[Path]:
    """A path that keeps leading to the same folder, whatever is renamed in between."""
    try:
        real = path.resolve(strict=True)
        descriptor = _open_folder(real, roots)
    except (OSError, ValueError, RuntimeError):
        # The same error outside the roots as for a missing folder: nobody learns what is elsewhere on this machine.
        message = f"Loading lora failed: there is no adapter folder at '{path}' that the server may read."
        raise ServingError(ErrorCode.ADAPTER_NOT_FOUND, message, param="lora_path") from None
    try:
        held = Path(f"/proc/self/fd/{descriptor}")
        yield held if held.exists() else real
    finally:
        os.close(descriptor)


def _open_folder(real: Path, roots: Sequence[Path] | None) -> int:
    """real: without links. A link that has been put on it since is not followed below a root."""
    if roots is None:
        return os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    for root in roots:
        if real.is_relative_to(root):
            return open_below(str(root), real.relative_to(root).parts, os.O_DIRECTORY)
    raise FileNotFoundError(real)


def _may_follow(folder: Path, links: FollowLinks) -> bool:
    if links is FollowLinks.IN_OWN_FOLDERS:
        return folder.stat().st_uid == os.geteuid()
    return links is FollowLinks.ALWAYS

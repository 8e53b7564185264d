"""Time to first token on a GPU: for prompts with adapters, and with an adapter that is not on the device yet (T3)."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu.decode import Side
from gpu.engine import first_tokens_s, make_requests, share
from gpu.record import Arm, Figure, Record, spread
from gpu.work import Prefill, Work

from loraserve.engine.engine import Engine

FROM_HOST = (Figure.FROM_HOST, Figure.FROM_HOST_ADDS)
FROM_FILE = (Figure.FROM_FILE, Figure.FROM_FILE_ADDS)
FROM_DISK = (Figure.FROM_DISK, Figure.FROM_DISK_ADDS)
READ_BYTES = 4 << 20


def prefills(sides: Sequence[Side], work: Work, prompts: Prefill) -> list[Record]:
    """The engines take turns: A, B, B, A, ... The first round warms up and loads the adapters onto the device."""
    used = [side.digests[: prompts.num_adapters] for side in sides]
    times: list[list[float]] = [[] for _ in sides]
    order = list(range(len(sides)))
    for _ in range(1 + work.prefill_repeats):
        for index in order:
            engine, shared = sides[index].engine, share(used[index], prompts.batch_size)
            times[index].append(first_tokens_s(engine, make_requests(engine, shared, prompts.prompt_tokens, 1)) * 1e3)
        order.reverse()
    return [
        spread(side.arm, Figure.PREFILL, (prompts.batch_size, len(digests), prompts.prompt_tokens, 1), values[1:])
        for side, digests, values in zip(sides, used, times, strict=True)
    ]


def use_once(engine: Engine, work: Work, digests: Sequence[str]) -> None:
    """Uses one after the other. Then all that fit are in the host's memory, and the last of them on the device."""
    for digest in digests:
        _first_token_s(engine, digest, min(work.cold_prompts))


def cold_start(
    engine: Engine,
    work: Work,
    figures: tuple[Figure, Figure],
    used_digest: str,
    cold_digests: Sequence[str],
    before: Callable[[str], None] = lambda _: None,
) -> list[Record]:
    """T3: time to first token with adapters that are not on the device, and the time that this adds.

    The added time is the difference to the same adapter's next request, which is reported as `FIRST_TOKEN`.
    used_digest: another adapter, used first to compile the kernels and warm the caches. before: called with each cold
    digest before its request.
    """
    records = []
    for index, num_prompt in enumerate(work.cold_prompts):
        _first_token_s(engine, used_digest, num_prompt)
        cold, warm, added = [], [], []
        for digest in cold_digests[index * work.cold_repeats :][: work.cold_repeats]:
            assert digest not in engine.stats().resident_adapters, f"adapter {digest[:12]} is on the device already"
            before(digest)
            cold.append(_first_token_s(engine, digest, num_prompt) * 1e3)
            warm.append(_first_token_s(engine, digest, num_prompt) * 1e3)
            added.append(cold[-1] - warm[-1])
        about = (1, 1, num_prompt, 1)
        for figure, values in zip((*figures, Figure.FIRST_TOKEN), (cold, added, warm), strict=True):
            records.append(spread(Arm.LORA, figure, about, values))
    return records


def _first_token_s(engine: Engine, digest: str, num_prompt: int) -> float:
    return first_tokens_s(engine, make_requests(engine, [digest], num_prompt, 1))


def drop_pages(path: Path) -> None:
    """Drops the file from the page cache, after syncing it to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_pages(path: Path) -> float:
    """Seconds to read the file, which is then in the page cache."""
    buffer = bytearray(READ_BYTES)
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - started


def file_reads(work: Work, path: Path) -> list[Record]:
    """Time to read the file's bytes alone, from disk and from the page cache."""
    disk, cached = [], []
    for _ in range(work.cold_repeats):
        drop_pages(path)
        disk.append(read_pages(path) * 1e3)
        cached.append(read_pages(path) * 1e3)
    about = (0, 1, 0, 0)
    return [
        spread(Arm.MACHINE, Figure.DISK_READ, about, disk),
        spread(Arm.MACHINE, Figure.FILE_READ, about, cached),
    ]

"""Publishes this server's engine and requests to all servers every second, and reads what others published."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

import msgspec

from loraserve.control.contents.residency import Residency
from loraserve.control.requests.records import record_of_ended, record_of_running
from loraserve.control.requests.running import RunningRequests
from loraserve.control.requests.snapshot_records import (
    EngineSnapshot,
    EngineState,
    ProcessSnapshot,
    RequestRecord,
    ResidentAdapter,
    RunningSnapshot,
    short_digest,
)
from loraserve.control.timed_cache import TimedCache
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.live_store import LiveStore
from loraserve.live.requests import EndedRequest
from loraserve.live.snapshots import Snapshot, SnapshotKind
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.runtime import Runtime

EVERY_S = 1.0
KEEP_S = 0.5
LONG_STEPS = 3
"""An engine that is silent for this many of its longest steps is stalled."""
RATE_OVER = 10
"""Seconds over which tokens per second are averaged."""


class Snapshots:
    """Called on the event loop."""

    def __init__(
        self,
        live: LiveStore,
        runtime: Runtime,
        running: RunningRequests,
        residency: Residency,
        unsettled: Callable[[], list[EndedRequest]],
        *,
        process: str,
        engine: str,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """unsettled: requests that have ended here, though Redis may not know it yet."""
        self._live = live
        self._runtime = runtime
        self._running = running
        self._residency = residency
        self._unsettled = unsettled
        self._process = process
        self._engine = engine
        self._clock = clock
        self._steady = steady
        self._started_at = clock()
        self._url = ""
        self._computed: deque[tuple[float, int]] = deque(maxlen=RATE_OVER + 1)
        """(monotonic seconds, tokens computed by then), one per second."""
        self._engine_decoder = msgspec.json.Decoder(EngineSnapshot)
        self._running_decoder = msgspec.json.Decoder(RunningSnapshot)
        self._engines: TimedCache[None, dict[str, EngineSnapshot]] = TimedCache(KEEP_S, self._read_engines)

    async def listens_at(self, url: str) -> None:
        """Where a client on this machine reaches the server; published at once if Redis is reachable."""
        self._url = url
        with contextlib.suppress(LiveUnavailableError):
            await self.publish()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(LiveUnavailableError):
                await self.publish()
            await asyncio.sleep(EVERY_S)

    async def publish(self) -> None:
        """Publish; also end requests here that others asked to end. Raises `LiveUnavailableError`."""
        stats = self._runtime.engine.stats
        self._computed.append((time.monotonic(), stats.num_prompt_tokens + stats.num_generation_tokens))
        await self._put(SnapshotKind.ENGINE, self._engine, self.own_engine())
        await self._put(SnapshotKind.PROCESS, self._process, self._own_process())
        await self._put(SnapshotKind.REQUESTS, self._process, RunningSnapshot(requests=self.own_requests()))
        for request_id in await self._live.aborts.take(self._process):
            self.abort_own(request_id)

    def _own_process(self) -> ProcessSnapshot:
        return ProcessSnapshot(
            engine=self._engine,
            url=self._url,
            digests=[short_digest(digest) for digest in self._residency.not_forgotten()],
            adapters=sorted(self._running.adapters()),
            tenants=sorted(self._running.tenants()),
        )

    async def withdraw(self) -> None:
        """Remove what was published. Call once `run` has ended. Raises `LiveUnavailableError`."""
        await self._live.snapshots.remove(SnapshotKind.ENGINE, self._engine)
        await self._live.snapshots.remove(SnapshotKind.PROCESS, self._process)
        await self._live.snapshots.remove(SnapshotKind.REQUESTS, self._process)

    def own_engine(self) -> EngineSnapshot:
        runtime = self._runtime
        model, stats = runtime.engine.model, runtime.engine.stats
        in_use = frozenset(stats.running_adapters)
        arena = [
            ResidentAdapter(offset, size, digest, digest in in_use)
            for digest, (offset, size) in zip(stats.resident_adapters, stats.resident_extents, strict=False)
        ]
        return EngineSnapshot(
            state=engine_state(runtime),
            at=self._clock(),
            started_at=self._started_at,
            model=runtime.settings.served_model_names[0],
            device=model.device,
            dtype=model.dtype,
            backend=model.backend,
            max_model_len=model.max_model_len,
            max_num_seqs=model.max_num_seqs,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            block_size=model.block_size,
            arena_size_bytes=stats.arena_size_bytes,
            arena_used_bytes=stats.arena_used_bytes,
            arena=sorted(arena, key=lambda resident: resident.offset_bytes),
            num_adapter_loads=stats.num_adapter_loads,
            num_adapter_evictions=stats.num_adapter_evictions,
            num_preemptions=stats.num_preemptions,
            tokens_per_s=self._tokens_per_s(),
            queues=stats.queues,
            weights=model.weights,
        )

    async def engines(self) -> dict[str, EngineSnapshot]:
        """By id, at most half a second old; while Redis is gone or full, only this server's own."""
        try:
            engines = await self._engines.get(None)
        except LiveUnavailableError:
            engines = {}
        return engines if self._engine in engines else {**engines, self._engine: self.own_engine()}

    def own_requests(self) -> list[RequestRecord]:
        """Those that run, then those of which Redis may not know yet how they ended: each is always in one place."""
        now_s = self._steady()
        ended = [record_of_ended(request) for request in self._unsettled()]
        return [
            *(record_of_running(running, now_s) for running in self._running),
            *(record for record in ended if record),
        ]

    async def requests(self) -> dict[str, list[RequestRecord]]:
        """Of each process, as `own_requests`; of others, up to a second old. Raises `LiveUnavailableError`.

        Of a process that stopped reporting: what it ran, until Redis knows how that ended. If it was killed, that is
        when its requests count as lost.
        """
        alive = {snapshot.owner for snapshot in await self._live.snapshots.all(SnapshotKind.PROCESS)}
        found = {
            snapshot.owner: self._running_decoder.decode(snapshot.body).requests
            for snapshot in await self._live.snapshots.all(SnapshotKind.REQUESTS)
        }
        silent = found.keys() - alive - {self._process}
        silent_ids = [record.id for process in silent for record in found[process]]
        ended = await self._live.requests.have_ended(silent_ids)
        for process in silent:
            found[process] = [record for record in found[process] if record.id not in ended]
        return {**found, self._process: self.own_requests()}

    async def last_requests(self, process: str) -> list[RequestRecord]:
        """What a process last reported, up to a minute ago; see `own_requests`. Raises `LiveUnavailableError`."""
        snapshot = await self._live.snapshots.get(SnapshotKind.REQUESTS, process)
        return [] if snapshot is None else self._running_decoder.decode(snapshot.body).requests

    def abort_own(self, request_id: str) -> bool:
        """False: it does not run here."""
        running = self._running.get(request_id)
        if running is not None:
            running.abort(ServingError(ErrorCode.REQUEST_ABORTED, "An operator of the server ended this request."))
        return running is not None

    async def _read_engines(self, _key: None) -> dict[str, EngineSnapshot]:
        snapshots = await self._live.snapshots.all(SnapshotKind.ENGINE)
        return {snapshot.owner: self._engine_decoder.decode(snapshot.body) for snapshot in snapshots}

    async def _put(self, kind: SnapshotKind, owner: str, body: msgspec.Struct) -> None:
        raw = msgspec.Raw(msgspec.json.encode(body))
        snapshot = Snapshot(owner=owner, at=self._clock(), body=raw)
        await self._live.snapshots.put(kind, snapshot)

    def _tokens_per_s(self) -> float:
        if len(self._computed) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._computed[0], self._computed[-1]
        return max(0, last - first) / max(last_s - first_s, 1e-3)


def engine_state(runtime: Runtime) -> EngineState:
    """An engine proves that it is ready by making progress, not by existing."""
    engine = runtime.engine
    if engine.error is not None:
        return EngineState.DEAD
    if runtime.lifecycle.draining:
        return EngineState.DRAINING
    stats = engine.stats
    has_work = stats.num_running > 0 or stats.num_waiting > 0 or runtime.lifecycle.num_sequences > 0
    patience_s = max(runtime.settings.progress_timeout_s, LONG_STEPS * engine.longest_step_s)
    is_stalled = has_work and time.monotonic() - engine.last_progress_s >= patience_s
    return EngineState.STALLED if is_stalled else EngineState.READY

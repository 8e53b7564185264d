"""/v1/live and /v1/engines: the present state."""

import hashlib
import time
from typing import Any, cast

import msgspec
from litestar import MediaType, Request, Response, get
from litestar.di import NamedDependency

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.needs import needs
from loraserve.api.openapi.document import ERROR_RESPONSES
from loraserve.api.openapi.operation_docs import IF_NONE_MATCH, heeds
from loraserve.api.schemas.live import ArenaExtent, EngineItem, EngineList, KvBlocks, LiveView, QueueRow
from loraserve.control.monitoring.live_views import EngineView
from loraserve.control.tenancy.principal import Action


@get("/v1/live", opt={**needs(Action.READ), **heeds(IF_NONE_MATCH)}, responses=ERROR_RESPONSES, tags=["live"])
async def get_live(request: Request, context: NamedDependency[AppContext]) -> Response[LiveView]:
    """Engines, their memory and their queues, at most 1.5 seconds old. Meant to be polled: 304 while nothing changes.

    A tenant sees the names of its own adapters; everything that belongs to others is summed up without names.
    """
    views = context.control.observer.live_views
    engines = [engine_item(view) for view in await views.engines(principal_of(request))]
    live = LiveView(at=time.time(), engines=engines, redis=views.redis)
    etag = _etag(live)
    if request.headers.get("if-none-match") == etag:
        return Response(cast(Any, None), status_code=304, headers={"etag": etag}, media_type=MediaType.TEXT)
    return Response(live, headers={"etag": etag, "cache-control": "no-cache"})


@get("/v1/engines", opt=needs(Action.READ), responses=ERROR_RESPONSES, tags=["live"])
async def list_engines(request: Request, context: NamedDependency[AppContext]) -> EngineList:
    """All engines, ordered by id."""
    views = await context.control.observer.live_views.engines(principal_of(request))
    return EngineList([engine_item(view) for view in views])


def engine_item(view: EngineView) -> EngineItem:
    snapshot = view.snapshot
    return EngineItem(
        id=view.engine,
        state=snapshot.state,
        at=snapshot.at,
        started_at=snapshot.started_at,
        model=snapshot.model,
        device=snapshot.device,
        dtype=snapshot.dtype,
        weights=snapshot.weights or snapshot.dtype,
        backend=snapshot.backend,
        max_model_len=snapshot.max_model_len,
        max_num_seqs=snapshot.max_num_seqs,
        num_running=snapshot.num_running,
        num_waiting=snapshot.num_waiting,
        kv=KvBlocks(
            snapshot.num_blocks,
            snapshot.num_free_blocks,
            snapshot.num_cached_blocks,
            snapshot.num_blocks - snapshot.num_free_blocks - snapshot.num_cached_blocks,
            snapshot.block_size,
        ),
        arena_size_bytes=snapshot.arena_size_bytes,
        arena_used_bytes=snapshot.arena_used_bytes,
        arena=[
            ArenaExtent(
                extent.offset_bytes,
                extent.size_bytes,
                extent.digest,
                extent.tenant,
                extent.adapter,
                extent.version,
                extent.in_use,
            )
            for extent in view.extents
        ],
        num_adapter_loads=snapshot.num_adapter_loads,
        num_adapter_evictions=snapshot.num_adapter_evictions,
        num_preemptions=snapshot.num_preemptions,
        tokens_per_s=round(snapshot.tokens_per_s, 2),
        queues=[
            QueueRow(queue.tenant, queue.adapter, queue.num_running, queue.num_waiting, queue.num_tokens_waiting)
            for queue in view.queues
        ],
    )


def _etag(live: LiveView) -> str:
    """Covers everything except the times of the report."""
    engines = [msgspec.structs.replace(engine, at=0.0) for engine in live.engines]
    content = msgspec.json.encode(msgspec.structs.replace(live, at=0.0, engines=engines))
    return f'W/"{hashlib.sha256(content).hexdigest()[:24]}"'

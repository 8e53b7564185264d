"""Liveness, readiness and the version."""

import msgspec
from litestar import HttpMethod, MediaType, Response, route
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec

from loraserve.api.app_context import AppContext
from loraserve.api.http.needs import PUBLIC
from loraserve.api.inference.identity import server_version
from loraserve.control.monitoring.live_views import RedisState
from loraserve.control.requests.snapshot_records import EngineState
from loraserve.control.requests.snapshots import engine_state

METHODS = [HttpMethod.GET, HttpMethod.HEAD]
"""Load balancers use either to probe."""
NOT_SERVING = {503: ResponseSpec(None, description="Requests would not be served.", generate_examples=False)}


class Version(msgspec.Struct, frozen=True):
    version: str


@route("/health", http_method=METHODS, opt=PUBLIC, responses=NOT_SERVING, media_type=MediaType.TEXT, tags=["health"])
async def health(context: NamedDependency[AppContext]) -> Response[bytes]:
    """200 unless the engine is dead."""
    return _answer(context.runtime.engine.error is None)


@route("/ping", http_method=METHODS, opt=PUBLIC, responses=NOT_SERVING, media_type=MediaType.TEXT, tags=["health"])
async def ping(context: NamedDependency[AppContext]) -> Response[bytes]:
    """The same as /health, under the name that SageMaker calls."""
    return _answer(context.runtime.engine.error is None)


@route("/health/live", http_method=METHODS, opt=PUBLIC, media_type=MediaType.TEXT, tags=["health"])
async def health_live() -> Response[bytes]:
    """200 as long as this process answers."""
    return _answer(True)


@route(
    "/health/ready", http_method=METHODS, opt=PUBLIC, responses=NOT_SERVING, media_type=MediaType.TEXT, tags=["health"]
)
async def health_ready(context: NamedDependency[AppContext]) -> Response[bytes]:
    """200 if requests sent now will be served. The engine has to make progress; that its process exists is not enough.

    Also 503 once Redis has been unreachable for longer than --redis-grace-s, because every request then gets a 503.
    """
    return _answer(is_ready(context))


@route("/version", http_method=METHODS, opt=PUBLIC, tags=["health"])
async def get_version() -> Version:
    """The version of the server."""
    return Version(server_version())


def is_ready(context: AppContext) -> bool:
    is_redis_gone = context.control.observer.live_views.redis is RedisState.GONE
    return engine_state(context.runtime) is EngineState.READY and not is_redis_gone


def _answer(ok: bool) -> Response[bytes]:
    return Response(b"", status_code=200 if ok else 503, media_type=MediaType.TEXT)

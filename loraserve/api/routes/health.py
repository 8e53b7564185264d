"""Is it alive, is it ready, what is it."""

import time

import msgspec
from litestar import HttpMethod, MediaType, Response, route
from litestar.di import NamedDependency

from loraserve.api.app_context import AppContext
from loraserve.api.auth import PUBLIC
from loraserve.api.identity import server_version
from loraserve.serving.runtime import Runtime

METHODS = [HttpMethod.GET, HttpMethod.HEAD]
"""Load balancers probe with either."""


class Version(msgspec.Struct, frozen=True):
    version: str


@route("/health", http_method=METHODS, opt=PUBLIC, media_type=MediaType.TEXT, tags=["health"])
async def health(context: NamedDependency[AppContext]) -> Response[bytes]:
    """200 unless the engine is dead."""
    return _answer(context.runtime.engine.error is None)


@route("/ping", http_method=METHODS, opt=PUBLIC, media_type=MediaType.TEXT, tags=["health"])
async def ping(context: NamedDependency[AppContext]) -> Response[bytes]:
    """The same, by the name that SageMaker calls."""
    return _answer(context.runtime.engine.error is None)


@route("/health/live", http_method=METHODS, opt=PUBLIC, media_type=MediaType.TEXT, tags=["health"])
async def health_live() -> Response[bytes]:
    """200 as long as this process answers."""
    return _answer(True)


@route("/health/ready", http_method=METHODS, opt=PUBLIC, media_type=MediaType.TEXT, tags=["health"])
async def health_ready(context: NamedDependency[AppContext]) -> Response[bytes]:
    """200 if requests sent now will be served: the engine proves it by progress, not by existing."""
    return _answer(is_ready(context.runtime))


@route("/version", http_method=METHODS, opt=PUBLIC, tags=["health"])
async def get_version() -> Version:
    return Version(server_version())


def is_ready(runtime: Runtime) -> bool:
    engine = runtime.engine
    if engine.error is not None or runtime.lifecycle.draining:
        return False
    stats = engine.stats
    has_work = stats.num_running > 0 or stats.num_waiting > 0 or runtime.lifecycle.num_sequences > 0
    idle_s = time.monotonic() - engine.last_progress_s
    return not has_work or idle_s < runtime.settings.progress_timeout_s


def _answer(ok: bool) -> Response[bytes]:
    return Response(b"", status_code=200 if ok else 503, media_type=MediaType.TEXT)

"""The HTTP application of --metrics-port: only /metrics and /health, for anyone who can reach the port."""

from dataclasses import replace

import msgspec
from litestar import Litestar
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp

from loraserve.api.app_context import AppContext
from loraserve.api.http.errors import handle_error
from loraserve.api.http.front_door import FrontDoor
from loraserve.api.http.state import put_runtime
from loraserve.api.routes import health, metrics
from loraserve.serving.errors import ServingError


def create_metrics_app(context: AppContext, allowed_hosts: list[str] | None) -> ASGIApp:
    """Requires no key.

    allowed_hosts: permitted Host headers if only this machine can reach the port, because web pages in its browsers can
    reach it too; None = any.
    """
    settings = msgspec.structs.replace(context.runtime.settings, allowed_hosts=allowed_hosts, allowed_origins=[])
    app = Litestar(
        [metrics.metrics, health.health],
        dependencies={"context": Provide(lambda: context, sync_to_thread=False)},
        exception_handlers={ServingError: handle_error, HTTPException: handle_error, Exception: handle_error},
        openapi_config=None,
        logging_config=None,
        debug=False,
    )
    put_runtime(app, context.runtime)
    return FrontDoor(app, replace(context.runtime, settings=settings), lambda: True)

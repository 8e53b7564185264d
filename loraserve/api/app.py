"""The HTTP application."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from litestar import Litestar, Router
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp
from litestar.types import Guard as GuardFunction

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import Credentials, Guard, KeyCredentials
from loraserve.api.http.errors import handle_error
from loraserve.api.http.front_door import FrontDoor
from loraserve.api.http.methods import options_handlers
from loraserve.api.http.needs import ANY_KEY, check_all_need
from loraserve.api.http.query_names import refuse_unknown_query
from loraserve.api.http.refusal_notes import note_refusal
from loraserve.api.http.session_cookie import CookieCredentials
from loraserve.api.http.state import put_runtime
from loraserve.api.inference.noted_app import NotedApp, OnEnd
from loraserve.api.openapi.document import openapi_config, render_document
from loraserve.api.route_table import BODIES, ROUTES
from loraserve.serving.errors import ServingError
from loraserve.serving.settings import ServingSettings


def create_app(context: AppContext, on_inference_end: OnEnd | None = None) -> ASGIApp:
    """The application that serves `context`, for the event loop on which `context` was built. It starts and stops
    nothing."""
    control = context.control
    credentials: list[Credentials] = [CookieCredentials(control.sessions), KeyCredentials(control.authenticator)]
    guard = Guard(credentials, control.authenticator, note_refusal(control.observer.refusals))
    app = _litestar(lambda: context, context.runtime.settings, [guard, refuse_unknown_query])
    put_runtime(app, context.runtime)
    noted = app if on_inference_end is None else NotedApp(app, on_inference_end)
    return FrontDoor(noted, context.runtime, lambda: control.authenticator.is_open)


def openapi_document() -> bytes:
    """The body of /schema/openapi.json, the same on every server: it does not depend on the model."""

    def no_context() -> AppContext:
        raise AssertionError("nothing is served")

    app = _litestar(no_context, ServingSettings(served_model_names=[], data_dir=Path()), [])
    return msgspec.json.format(_render(app.openapi_schema.to_schema()), indent=2) + b"\n"


def _render(document: dict[str, Any]) -> bytes:
    return render_document(document, BODIES, ROUTES)


def _litestar(
    provide_context: Callable[[], AppContext], settings: ServingSettings, guards: list[GuardFunction]
) -> Litestar:
    check_all_need(ROUTES)
    return Litestar(
        [*options_handlers(ROUTES), *ROUTES],
        dependencies={"context": Provide(provide_context, sync_to_thread=False)},
        guards=guards,
        exception_handlers={ServingError: handle_error, HTTPException: handle_error, Exception: handle_error},
        request_max_body_size=settings.limits.max_body_bytes,
        openapi_config=openapi_config(Router("/schema", route_handlers=[], opt=ANY_KEY), _render),
        logging_config=None,
        debug=False,
    )

"""Keeps the runtime as a typed object in the app's state."""

from litestar import Litestar
from litestar.connection import ASGIConnection

from loraserve.serving.runtime import Runtime

KEY = "runtime"


def put_runtime(app: Litestar, runtime: Runtime) -> None:
    app.state[KEY] = runtime


def runtime_of(connection: ASGIConnection) -> Runtime:
    return connection.app.state[KEY]

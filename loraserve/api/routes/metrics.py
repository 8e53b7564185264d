"""GET /metrics."""

from litestar import Response, get
from litestar.di import NamedDependency

from loraserve.api.app_context import AppContext
from loraserve.api.http.needs import SCRAPING
from loraserve.api.openapi.document import ERROR_RESPONSES

CONTENT_TYPE = "text/plain; version=0.0.4"
"""Litestar adds the charset."""


@get("/metrics", opt=SCRAPING, responses=ERROR_RESPONSES, tags=["health"], media_type="text/plain")
async def metrics(context: NamedDependency[AppContext]) -> Response[bytes]:
    """Metrics of the server and its adapters in the Prometheus text format."""
    return Response(context.runtime.metrics.render(), media_type=CONTENT_TYPE)

"""/ui: the console, to which / redirects. It is one page, with its views in the URL's fragment."""

from litestar import HttpMethod, Request, Response, route
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.http.needs import PUBLIC
from loraserve.api.http.ui_files import INDEX
from loraserve.serving.errors import ErrorCode, ServingError

METHODS = [HttpMethod.GET, HttpMethod.HEAD]


@route("/", http_method=METHODS, opt=PUBLIC, include_in_schema=False)
async def find_ui() -> Response[bytes]:
    return _moved()


@route("/ui", http_method=METHODS, opt=PUBLIC, include_in_schema=False)
async def ui_index(request: Request, context: NamedDependency[AppContext]) -> Response[bytes]:
    """Refers to its files relative to /ui/, so that it also works below a path of a proxy."""
    if not request.scope["raw_path"].endswith(b"/"):
        return _moved()
    return _answer(request, context, INDEX)


@route("/ui/{path:path}", http_method=METHODS, opt=PUBLIC, include_in_schema=False)
async def ui_file(request: Request, context: NamedDependency[AppContext], path: FromPath[str]) -> Response[bytes]:
    return _answer(request, context, path.lstrip("/") or INDEX)


def _moved() -> Response[bytes]:
    return Response(b"", status_code=307, headers={"location": "ui/"}, media_type="text/plain")


def _answer(request: Request, context: AppContext, path: str) -> Response[bytes]:
    # NOTE: a lookup among the files read at start; the path never reaches the file system.
    found = context.ui_files.get(path)
    if found is None:
        raise ServingError(ErrorCode.NOT_FOUND, f"The console has no file {path[:128]!r}. Its page is at /ui/.")
    if request.headers.get("if-none-match") == found.headers["etag"]:
        return Response(b"", status_code=304, headers=found.headers)
    body = b"" if request.method == "HEAD" else found.content
    headers = {**found.headers, "content-length": str(len(found.content))}
    return Response(body, headers=headers, media_type=found.media_type)

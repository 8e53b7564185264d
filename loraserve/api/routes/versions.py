"""/v1/adapters/{name}/versions."""

from email.utils import formatdate

from litestar import Request, Response, delete, get
from litestar.datastructures import ETag
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery
from litestar.response import File

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.needs import needs
from loraserve.api.http.request_id import request_id_of
from loraserve.api.management.answers import NOT_CACHED, shown
from loraserve.api.management.etags import expected_rev
from loraserve.api.openapi.document import ERROR_RESPONSES
from loraserve.api.openapi.operation_docs import IF_MATCH, IF_NONE_MATCH, heeds
from loraserve.api.schemas.reports import ReportItem, report_item
from loraserve.api.schemas.versions import VersionItem, VersionList
from loraserve.control.paging import DEFAULT_PAGE, Order, page_of
from loraserve.control.tenancy.principal import Action
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.blobs import CONFIG_FILE, WEIGHTS_FILE
from loraserve.store.records import VersionRecord

NEWEST_FIRST: Order[VersionRecord] = Order(
    "versions", lambda version: version.n, lambda version: str(version.n), is_down=True
)
FILES = (CONFIG_FILE, WEIGHTS_FILE)
MEDIA_TYPE = "application/octet-stream"


@get("/v1/adapters/{name:str}/versions", opt=needs(Action.READ), responses=ERROR_RESPONSES, tags=["adapters"])
async def list_versions(
    request: Request,
    context: NamedDependency[AppContext],
    name: FromPath[str],
    limit: FromQuery[int] = DEFAULT_PAGE,
    cursor: FromQuery[str | None] = None,
) -> VersionList:
    """The adapter's versions, newest first, without deleted ones. `limit`: items per page, 1 to 500."""
    document, versions = await context.control.versions.list(principal_of(request), name)
    page = page_of(versions, NEWEST_FIRST, limit=limit, cursor=cursor)
    return VersionList(
        [context.adapter_items.version(principal_of(request), document.doc, version) for version in page.items],
        page.next_cursor,
    )


@get(
    "/v1/adapters/{name:str}/versions/{version:int}",
    opt={**needs(Action.READ), **heeds(IF_NONE_MATCH)},
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def get_version(
    request: Request, context: NamedDependency[AppContext], name: FromPath[str], version: FromPath[int]
) -> Response[VersionItem]:
    """One version of an adapter."""
    document, record = await context.control.versions.read(principal_of(request), name, version)
    return shown(request, document.rev, context.adapter_items.version(principal_of(request), document.doc, record))


@get(
    "/v1/adapters/{name:str}/versions/{version:int}/report",
    opt=needs(Action.READ),
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def get_report(
    request: Request, context: NamedDependency[AppContext], name: FromPath[str], version: FromPath[int]
) -> ReportItem:
    """The results of validating its content, from whichever upload first sent that content."""
    _, record = await context.control.versions.read(principal_of(request), name, version)
    manifest = await context.control.contents.manifest(record.digest)
    return report_item(manifest.report)


@get(
    "/v1/adapters/{name:str}/versions/{version:int}/files/{file:str}",
    opt=needs(Action.OPERATE),
    media_type=MEDIA_TYPE,
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def get_file(
    request: Request,
    context: NamedDependency[AppContext],
    name: FromPath[str],
    version: FromPath[int],
    file: FromPath[str],
) -> File:
    """A file of a version, identical whoever first sent this content. Last-Modified is the creation of the version."""
    _, record = await context.control.versions.read(principal_of(request), name, version)
    if file not in FILES:
        known = " and ".join(f"'{known}'" for known in FILES)
        raise ServingError(ErrorCode.NOT_FOUND, f"A version has the files {known}.")
    path = context.control.contents.file(record.digest, file)
    return File(
        path,
        filename=f"{name}-v{version}-{file}",
        media_type=MEDIA_TYPE,
        etag=ETag(value=record.digest),
        headers={"last-modified": formatdate(record.created_at, usegmt=True)} | NOT_CACHED,
    )


@delete(
    "/v1/adapters/{name:str}/versions/{version:int}",
    opt={**needs(Action.OPERATE), **heeds(IF_MATCH)},
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def delete_version(
    request: Request, context: NamedDependency[AppContext], name: FromPath[str], version: FromPath[int]
) -> None:
    """Delete a version; refused (409) while an alias refers to it."""
    await context.control.versions.delete(
        principal_of(request), request_id_of(request.scope), name, version, expected_rev=expected_rev(request)
    )

"""Upload sessions: /v1/adapters/{name}/uploads and /v1/uploads."""

import msgspec
from litestar import Request, Response, delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.needs import needs
from loraserve.api.http.ranges import check_range
from loraserve.api.http.request_id import request_id_of
from loraserve.api.management.idempotency import once
from loraserve.api.management.multipart_form import least_size_bytes, receive_adapter
from loraserve.api.management.uploads import chunk_of, upload_item
from loraserve.api.openapi.document import ERROR_RESPONSES, binary_body, json_body, multipart_body
from loraserve.api.openapi.operation_docs import CONTENT_RANGE, IDEMPOTENCY_KEY, heeds
from loraserve.api.schemas.uploads import ChunkReceived, CreateUploadRequest, UploadItem, UploadList
from loraserve.control.paging import DEFAULT_PAGE, Order, page_of
from loraserve.control.tenancy.principal import Action
from loraserve.store.upload_session import UploadFile, UploadSession

MAX_WAIT_S = 30.0
NEWEST_FIRST: Order[UploadSession] = Order(
    "uploads", lambda session: session.created_at, lambda session: session.id, is_down=True
)
CREATE_DECODER = msgspec.json.Decoder(CreateUploadRequest, strict=True)


@post(
    "/v1/adapters/{name:str}/uploads",
    opt={**needs(Action.OPERATE), **heeds(IDEMPOTENCY_KEY)},
    operation_class=json_body(CreateUploadRequest),
    responses=ERROR_RESPONSES,
    tags=["uploads"],
)
async def create_upload(request: Request, context: NamedDependency[AppContext], name: FromPath[str]) -> UploadItem:
    """Open an upload: then PUT the config, PUT the weights in chunks, and commit.

    At most 64 open uploads per tenant.
    """
    body = await decode_body(request, CREATE_DECODER)
    files = [UploadFile(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256) for file in body.files]

    async def create() -> UploadItem:
        principal = principal_of(request)
        return upload_item(await context.control.uploads.open(principal, name, files, activate=body.activate))

    return await once(request, context.control.live.sessions, create, UploadItem)


@put(
    "/v1/uploads/{upload_id:str}/files/{file:str}",
    opt={**needs(Action.OPERATE), **heeds(CONTENT_RANGE)},
    operation_class=binary_body(),
    request_max_body_size=None,
    responses=ERROR_RESPONSES,
    tags=["uploads"],
)
async def put_file(
    request: Request, context: NamedDependency[AppContext], upload_id: FromPath[str], file: FromPath[str]
) -> ChunkReceived:
    """Send a chunk with `Content-Range`, or the whole file. Content that is invalid from its beginning is refused at
    once (400)."""
    chunk = chunk_of(request)
    next_byte = await context.control.uploads.put_chunk(
        principal_of(request), upload_id, file, chunk.start, chunk.body, file_bytes=chunk.file_bytes
    )
    return ChunkReceived(next_byte)


@post(
    "/v1/uploads/{upload_id:str}/commit",
    opt=needs(Action.OPERATE),
    status_code=202,
    responses=ERROR_RESPONSES,
    tags=["uploads"],
)
async def commit_upload(request: Request, context: NamedDependency[AppContext], upload_id: FromPath[str]) -> UploadItem:
    """Validate and publish the upload. Returns at once; GET reports the progress. May be repeated."""
    session = await context.control.uploads.commit(principal_of(request), request_id_of(request.scope), upload_id)
    return upload_item(session)


@get("/v1/uploads/{upload_id:str}", opt=needs(Action.OPERATE), responses=ERROR_RESPONSES, tags=["uploads"])
async def get_upload(
    request: Request,
    context: NamedDependency[AppContext],
    upload_id: FromPath[str],
    wait_s: FromQuery[float] = 0.0,
) -> UploadItem:
    """The state of an upload. `wait_s`: wait up to this many seconds, 0 to 30, for a commit to end."""
    check_range("wait_s", wait_s, 0.0, MAX_WAIT_S)
    return upload_item(await context.control.uploads.get(principal_of(request), upload_id, wait_s))


@get("/v1/uploads", opt=needs(Action.OPERATE), responses=ERROR_RESPONSES, tags=["uploads"])
async def list_uploads(
    request: Request,
    context: NamedDependency[AppContext],
    limit: FromQuery[int] = DEFAULT_PAGE,
    cursor: FromQuery[str | None] = None,
) -> UploadList:
    """The tenant's uploads, newest first. `limit`: items per page, 1 to 500."""
    uploads = context.control.uploads
    sessions = await uploads.list(principal_of(request))
    page = page_of(sessions, NEWEST_FIRST, limit=limit, cursor=cursor)
    return UploadList([upload_item(session) for session in await uploads.with_reports(page.items)], page.next_cursor)


@delete(
    "/v1/uploads/{upload_id:str}",
    opt=needs(Action.OPERATE),
    responses=ERROR_RESPONSES,
    tags=["uploads"],
)
async def abort_upload(request: Request, context: NamedDependency[AppContext], upload_id: FromPath[str]) -> None:
    """End an upload and remove what was sent; its record stays readable. 409 while it is being published."""
    await context.control.uploads.abort(principal_of(request), upload_id)


@post(
    "/v1/adapters",
    opt=needs(Action.OPERATE),
    operation_class=multipart_body(),
    request_max_body_size=None,
    responses=ERROR_RESPONSES,
    tags=["uploads"],
)
async def add_adapter(request: Request, context: NamedDependency[AppContext]) -> Response[UploadItem]:
    """Upload an adapter in one request, for example with curl: a form with `name` and both files. Returns once the
    adapter is ready."""
    principal, request_id, uploads = principal_of(request), request_id_of(request.scope), context.control.uploads
    async with (
        uploads.incoming(principal, least_size_bytes(request)) as incoming,
        receive_adapter(request, context.runtime.settings.data_dir, incoming.max_bytes) as form,
    ):
        session = await uploads.from_path(
            principal, request_id, form.name, form.folder, roots=None, activate=form.activate, form=incoming
        )
    return Response(upload_item(session), status_code=201)

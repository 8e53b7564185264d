"""GET /v1/adapters/{name}/versions/{version}/certificate."""

import asyncio

from litestar import Request, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.needs import needs
from loraserve.api.openapi.document import ERROR_RESPONSES
from loraserve.api.schemas.certificates import CertificateState, CertificateView
from loraserve.control.contents.certificate import Certificate, CertificateStatus
from loraserve.control.tenancy.principal import Action

STATES = {
    CertificateStatus.AGREES: CertificateState.DONE,
    CertificateStatus.DIFFERS: CertificateState.FAILED,
    CertificateStatus.SKIPPED: CertificateState.SKIPPED,
}


@get(
    "/v1/adapters/{name:str}/versions/{version:int}/certificate",
    opt=needs(Action.READ),
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def get_certificate(
    request: Request, context: NamedDependency[AppContext], name: FromPath[str], version: FromPath[int]
) -> CertificateView:
    """How far the served model's answers with this version differ from PEFT's.

    Measured in the background once the version is ready. If that was interrupted, or the base model has changed since,
    this call starts it.
    """
    _, record = await context.control.versions.read(principal_of(request), name, version)
    certifier = context.control.certifier
    if certifier is None:
        return _without(CertificateState.SKIPPED, "this server makes no certificates (--no-certificates)")
    certificate = await asyncio.to_thread(certifier.of, record.digest)
    if certificate is None:
        certifier.queue(record.digest)
        return _without(CertificateState.PENDING, "it is being measured in the background")
    return _view(certificate)


def _view(certificate: Certificate) -> CertificateView:
    state, reason = STATES[certificate.status], certificate.reason
    if state is CertificateState.FAILED:
        reason = (
            f"by {certificate.relative_difference:.1e} of the largest logit; {certificate.tolerance:.1e} is allowed"
        )
    return CertificateView(
        state=state,
        max_logit_difference=certificate.largest_difference,
        num_tokens=certificate.num_positions or None,
        reason=reason,
    )


def _without(state: CertificateState, reason: str) -> CertificateView:
    return CertificateView(state=state, max_logit_difference=None, num_tokens=None, reason=reason)

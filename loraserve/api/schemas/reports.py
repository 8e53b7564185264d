"""What the validation of an adapter found."""

import msgspec
from loraserve_adapters.checks import CheckStatus

from loraserve.control.ingest.report import Report


class CheckItem(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """What was checked; stable, such as "weights.shapes"."""
    status: CheckStatus
    message: str
    code: str | None = None
    """Why it failed or warns; stable, such as "rank_mismatch"."""
    file: str | None = None
    """The file at fault."""
    key: str | None = None
    """The config's field or the tensor at fault."""
    found: str | None = None
    expected: str | None = None
    remedy: str | None = None
    """What to do about it."""


class ReportItem(msgspec.Struct, frozen=True):
    checks: list[CheckItem]
    """Failures first, then warnings, then what passed."""
    object: str = "adapter.report"


def report_item(report: Report) -> ReportItem:
    return ReportItem(
        [
            CheckItem(
                name=check.name,
                status=check.status,
                message=check.message,
                code=check.code,
                file=check.file,
                key=check.key,
                found=check.found,
                expected=check.expected,
                remedy=check.remedy,
            )
            for check in report.checks
        ]
    )

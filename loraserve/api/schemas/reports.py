"""Results of validating an adapter."""

import msgspec
from loraserve_adapters.checks import CheckStatus

from loraserve.control.ingest.report import Report


class CheckItem(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    name: str
    """Stable name of the check, such as "weights.shapes"."""
    status: CheckStatus
    """ "pass", "warn" or "fail"."""
    message: str
    code: str | None = None
    """Stable reason for a failure or warning, such as "rank_mismatch"; null if it passed."""
    file: str | None = None
    """The file at fault."""
    key: str | None = None
    """The config field or tensor at fault."""
    found: str | None = None
    expected: str | None = None
    remedy: str | None = None
    """How to correct it."""


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

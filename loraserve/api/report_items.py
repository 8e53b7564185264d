"""From validation reports to what the API shows."""

from loraserve.api.schemas.reports import CheckItem, ReportItem
from loraserve.control.ingest.report import Report


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

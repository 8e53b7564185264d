"""The validation report of an uploaded adapter, as it is stored, shown and returned."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.chat_template import other_chat_template
from loraserve_adapters.checks import Check, Checks, CheckStatus
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import DEFAULT_LIMITS
from loraserve_adapters.rules import AdapterRules
from loraserve_adapters.source import check_adapter

from loraserve.serving.errors import ErrorCode, ServingError


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Every check with its outcome: failures first, then warnings, then passed checks."""

    checks: list[Check]

    @property
    def accepted(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.status == CheckStatus.FAIL]

    @property
    def summary(self) -> str:
        """One sentence: the first reason for a refusal, or how many checks passed."""
        failures = self.failures
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            return f"{failures[0].message}{more}"
        num_warnings = sum(check.status == CheckStatus.WARN for check in self.checks)
        if num_warnings:
            plural = "" if num_warnings == 1 else "s"
            return f"{len(self.checks) - num_warnings} checks passed, {num_warnings} warning{plural}"
        return f"all {len(self.checks)} checks passed"

    @property
    def codes(self) -> list[str]:
        """Error codes of the failures."""
        return [check.code or "" for check in self.failures]


class AdapterRejectedError(ServingError):
    """The content of an upload is refused; `report` says why, check by check."""

    def __init__(self, report: Report) -> None:
        super().__init__(ErrorCode.ADAPTER_REJECTED, f"The adapter is refused: {report.summary}.")
        self.report = report


def validate_adapter(
    folder: Path, layout: BaseLayout, chat_template: str | None, base_names: Iterable[str] = ()
) -> Report:
    """Checks a whole folder in this process: for the command line, never for a tenant's files in a server.

    Links are followed, as when the command line uploads the folder. chat_template: the base model's.
    """
    checks = Checks()
    rules = AdapterRules(replace(DEFAULT_LIMITS, follow_symlinks=True), tuple(base_names))
    check_adapter(folder, layout, checks, rules)
    file = other_chat_template(folder, chat_template)
    if file is not None:
        message = f"{file}: its chat template is not used: chats are rendered with the base model's, which differs"
        checks.warn("folder.chat_template", AdapterError("other_chat_template", message, file=file))
    return Report(checks=checks.listed())

"""What was checked in an adapter, with all outcomes, not only the first failure."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from loraserve_adapters.errors import AdapterError
from loraserve_adapters.remedies import remedy_for

T = TypeVar("T")

MAX_FAILURES_SHOWN = 100
"""Per check; the rest is only counted."""


class CheckStatus(StrEnum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a validation report. Texts are ASCII and bounded, whatever the tenant's file holds."""

    name: str
    """Stable: what was checked, such as "config.options" or "weights.shapes"."""
    status: CheckStatus
    message: str
    code: str | None = None
    """Stable: why it failed or warns, such as "rank_mismatch"; None if it passed."""
    file: str | None = None
    key: str | None = None
    """The config's field or the tensor's name."""
    found: str | None = None
    expected: str | None = None
    remedy: str | None = None


class Checks:
    """Collects the outcome of one validation."""

    def __init__(self) -> None:
        self._checks: list[Check] = []
        self._errors: list[AdapterError] = []
        self._num_failures: dict[str, int] = {}

    def passed(self, name: str, message: str, *, found: str | None = None, expected: str | None = None) -> None:
        self._checks.append(Check(name, CheckStatus.PASS, message, found=found, expected=expected))

    def warn(self, name: str, error: AdapterError) -> None:
        self._checks.append(_from_error(name, CheckStatus.WARN, error))

    def fail(self, name: str, error: AdapterError) -> None:
        self._errors.append(error)
        count = self._num_failures[name] = self._num_failures.get(name, 0) + 1
        if count <= MAX_FAILURES_SHOWN:
            self._checks.append(_from_error(name, CheckStatus.FAIL, error))

    def attempt(self, name: str, check: Callable[[], T]) -> T | None:
        """The result of `check`, or None if it raises `AdapterError`, which is then recorded under `name`."""
        try:
            return check()
        except AdapterError as error:
            self.fail(name, error)
            return None

    @property
    def has_failed(self) -> bool:
        return bool(self._errors)

    def failed(self, name: str) -> bool:
        return name in self._num_failures

    def raise_first(self) -> None:
        """Raise the first failure, if there is one."""
        if self._errors:
            raise self._errors[0]

    def listed(self) -> list[Check]:
        """Failures first, then warnings, then what passed; each in the order it was found."""
        order = [CheckStatus.FAIL, CheckStatus.WARN, CheckStatus.PASS]
        checks = self._checks + [
            Check(name, CheckStatus.FAIL, f"{count - MAX_FAILURES_SHOWN} more failures of this kind", code="and_more")
            for name, count in self._num_failures.items()
            if count > MAX_FAILURES_SHOWN
        ]
        return sorted(checks, key=lambda check: order.index(check.status))


def _from_error(name: str, status: CheckStatus, error: AdapterError) -> Check:
    return Check(
        name,
        status,
        error.message,
        code=error.code,
        file=error.file,
        key=error.shown_key,
        found=error.found,
        expected=error.expected,
        remedy=error.remedy or remedy_for(error.code),
    )

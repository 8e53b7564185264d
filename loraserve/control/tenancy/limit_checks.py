"""Validation of limits."""

from msgspec.structs import asdict

from loraserve.serving.errors import invalid_value
from loraserve.store.records import Limits

NO_LIMITS = Limits()
MAX_LIMIT = 2**53
"""Redis's Lua, JSON and JavaScript all represent integers up to this one exactly."""
OF_TENANTS_ONLY = ("max_adapters", "max_adapter_bytes")


def check_limits(limits: Limits, *, of_tenant: bool) -> None:
    """Raises `ServingError`."""
    for name, value in asdict(limits).items():
        if value is None:
            continue
        if not 0 <= value <= MAX_LIMIT:
            raise invalid_value(f"limits.{name}", f"is {value}; it must be 0 to {MAX_LIMIT}, or null for no limit.")
        if name in OF_TENANTS_ONLY and not of_tenant:
            raise invalid_value(f"limits.{name}", "can be set for tenants only, not for keys.")

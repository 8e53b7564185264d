"""What a route requires of its callers, as its `opt`. A route that does not say is not served at all."""

from collections.abc import Iterable
from typing import Any

from litestar.handlers import BaseRouteHandler
from litestar.types import ControllerRouterHandler

from loraserve.control.tenancy.principal import Action

ACTION = "action"
PUBLIC_OPT = "public"
ANYONE = "anyone"
TIMED = "timed"
ADMITTED = "admitted"
UNCONFIRMED = "unconfirmed"
EVERY_TENANT = "every_tenant"

PUBLIC: dict[str, Any] = {PUBLIC_OPT: True}
"""Needs no key."""
ANY_KEY: dict[str, Any] = {ANYONE: True}
"""Needs a key, whatever its role."""


def needs(action: Action) -> dict[str, Any]:
    """Needs a key whose role allows this."""
    return {ACTION: action}


LOGOUT = {**ANY_KEY, UNCONFIRMED: True}
"""Works even if Redis knows a newer revision of the key than the disk has, so that its cookie can be removed."""

INFERENCE = {**needs(Action.INFER), TIMED: True, ADMITTED: True}
"""Responses report the processing time. Admission checks in Redis that the key's revision is the newest."""

SCRAPING = {**needs(Action.READ), EVERY_TENANT: True}
"""Shows all tenants' adapters, so it needs a key for all tenants (`*`)."""


def check_all_need(handlers: Iterable[ControllerRouterHandler]) -> None:
    """Asserts that every handler declares its requirement, so that a missing one is found when the app is created."""
    for handler in handlers:
        assert isinstance(handler, BaseRouteHandler)
        declared = handler.opt.keys() & {ACTION, PUBLIC_OPT, ANYONE}
        assert len(declared) == 1, f"{handler.handler_name} does not say who may call it"

import pytest
from litestar import get

from loraserve.api.http.needs import PUBLIC, check_all_need, needs
from loraserve.api.route_table import ROUTES
from loraserve.control.tenancy.principal import Action


@get("/forgotten")
async def forgotten() -> None: ...


@get("/both", opt={**PUBLIC, **needs(Action.READ)})
async def both() -> None: ...


def test_every_route_declares_who_may_call_it() -> None:
    check_all_need(ROUTES)


@pytest.mark.parametrize("handler", [forgotten, both])
def test_a_route_that_declares_nothing_or_two_things_is_refused(handler: object) -> None:
    with pytest.raises(AssertionError, match="does not say who may call it"):
        check_all_need([*ROUTES, handler])  # pyright: ignore[reportArgumentType]

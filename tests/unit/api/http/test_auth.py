from pathlib import Path
from typing import cast

import pytest
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import HTTPScope

from loraserve.api.http.auth import STATE_KEY, Guard, KeyCredentials
from loraserve.api.routes.completions import create_completion
from loraserve.control.tenancy.key_documents import KeyPatch
from loraserve.control.tenancy.principal import Principal
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import Role
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, Node, run, running_node, with_tenants

__all__ = ["valkey"]


async def let_in(node: Node, key: str, handler: BaseRouteHandler) -> Principal:
    """Raises `ServingError`."""
    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = cast(HTTPScope, {"type": "http", "headers": headers, "state": {}})
    guard = Guard([KeyCredentials(node.authenticator)], node.authenticator, lambda *_: None)
    await guard(ASGIConnection(scope), handler)
    return scope["state"][STATE_KEY]


def test_a_server_that_has_not_heard_of_a_keys_new_role_lets_it_infer(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url) as one:
            await with_tenants(one)
            issued = await one.keys.create(ACME, "r", role=Role.VIEWER)
            async with running_node(data_dir, valkey.url, follow=False) as deaf:
                with pytest.raises(ServingError) as refused:
                    await let_in(deaf, issued.text, create_completion)
                assert refused.value.code is ErrorCode.FORBIDDEN
                await one.keys.patch(ACME, "r", issued.document.id, KeyPatch(role=Role.OPERATOR))
                assert (await let_in(deaf, issued.text, create_completion)).role is Role.OPERATOR

    run(scenario)

import dataclasses
from pathlib import Path

import pytest

from loraserve.engine.request import EngineStats
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import Tier
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, PACKED, Node, run, running_node, with_tenants

__all__ = ["valkey"]


def with_arena_bytes(node: Node, size_bytes: int) -> None:
    node.engine.model = dataclasses.replace(node.engine.model, arena_size_bytes=size_bytes)


async def publish_three(node: Node) -> dict[str, str]:
    """Digests by name."""
    await with_tenants(node)
    return {name: await node.publish(name, name) for name in ("a", "b", "c")}


def test_no_more_is_pinned_to_the_device_than_fits_there(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await publish_three(node)
            with_arena_bytes(node, 2 * len(PACKED) + 1)
            for name in ("a", "b", "a"):
                await node.adapters.pin(ACME, "r", name, Tier.DEVICE, ttl_s=60)
            with pytest.raises(ServingError, match="'c' takes 7 bytes, and of the 15 bytes") as refused:
                await node.adapters.pin(ACME, "r", "c", Tier.DEVICE, ttl_s=60)
            assert refused.value.code is ErrorCode.CONFLICT
            assert (await node.adapters.read(ACME, "c")).doc.pin is None
            await node.adapters.pin(ACME, "r", "c", Tier.HOST, ttl_s=60)
            await node.adapters.unpin(ACME, "r", "a")
            await node.adapters.pin(ACME, "r", "c", Tier.DEVICE, ttl_s=60)

    run(scenario)


def test_pins_that_do_not_fit_here_do_not_drive_out_each_other(valkey: Valkey, tmp_path: Path) -> None:
    """Another server, with more memory, took them."""

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            digests = await publish_three(node)
            for name in digests:
                await node.adapters.pin(ACME, "r", name, Tier.DEVICE, ttl_s=60)
            with_arena_bytes(node, 2 * len(PACKED) + 1)
            for _ in range(2):
                node.engine.requests.clear()
                await node.pins.keep()
                # The fake engine has none in its arena.
                warmed = [request.adapter_digest for request in node.engine.requests]
                assert warmed == [digests["a"], digests["b"]]
            assert set(node.engine.known) == {*digests.values()}
            node.engine.stats = EngineStats(resident_adapters=[digests["a"], digests["b"]])
            node.engine.requests.clear()
            await node.pins.keep()
            assert node.engine.requests == []

    run(scenario)

import dataclasses
from pathlib import Path

import pytest

from loraserve.engine.request import EngineStats
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import Tier
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, PACKED, Node, eventually, run, running_node, two_nodes, with_tenants

__all__ = ["valkey"]


def with_arena_bytes(node: Node, size_bytes: int) -> None:
    node.engine.model = dataclasses.replace(node.engine.model, arena_size_bytes=size_bytes)


async def publish_three(node: Node) -> dict[str, str]:
    """Digests by name."""
    await with_tenants(node)
    return {name: await node.publish(name, name) for name in ("a", "b", "c")}


def test_device_pins_that_do_not_fit_in_the_arena_are_refused(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await publish_three(node)
            with_arena_bytes(node, 2 * len(PACKED) + 1)
            for name in ("a", "b", "a"):
                await node.adapters.pin(ACME, "r", name, Tier.DEVICE, ttl_s=60)
            with pytest.raises(ServingError, match="'c' takes 7 bytes, but of the 15 bytes") as refused:
                await node.adapters.pin(ACME, "r", "c", Tier.DEVICE, ttl_s=60)
            assert refused.value.code is ErrorCode.CONFLICT
            assert (await node.adapters.read(ACME, "c")).doc.pin is None
            await node.adapters.pin(ACME, "r", "c", Tier.HOST, ttl_s=60)
            await node.adapters.unpin(ACME, "r", "a")
            await node.adapters.pin(ACME, "r", "c", Tier.DEVICE, ttl_s=60)

    run(scenario)


def test_pins_that_do_not_fit_on_this_server_do_not_evict_each_other(valkey: Valkey, tmp_path: Path) -> None:
    """Another server, which has more memory, accepted them."""

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


async def pin_on_both(one: Node, two: Node) -> None:
    one.clock.now += 1
    await one.adapters.pin(ACME, "r", "sql", Tier.HOST, ttl_s=60)
    await eventually(lambda: two.catalog.adapter("acme", "sql") == one.catalog.adapter("acme", "sql"))


def test_a_pin_that_cannot_be_loaded_is_retried_less_and_less_often(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            digest = await one.publish("sql", "one")
            await pin_on_both(one, two)
            blob, gone = one.blobs.folder(digest), tmp_path / "gone"
            assert blob is not None
            blob.rename(gone)
            Path(one.engine.known[digest]).unlink()

            async def checks_with_a_try(num_checks: int) -> list[int]:
                found = []
                for check in range(num_checks):
                    caplog.clear()
                    await two.pins.keep()
                    found += [check] if "cannot be kept in memory" in caplog.text else []
                return found

            await checks_with_a_try(1)
            assert await checks_with_a_try(20) == [0, 2, 6, 14]
            # The pin was changed, so it is retried from the start.
            await pin_on_both(one, two)
            assert await checks_with_a_try(4) == [0, 1, 3]
            gone.rename(blob)
            assert await checks_with_a_try(4) == []
            assert digest in two.engine.known

    run(scenario)


def test_the_number_of_checks_between_retries_of_a_pin_is_limited(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.control.adapters.pins.MAX_CHECKS_BETWEEN_TRIES", 4)

    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            await one.publish("sql", "one")
            await pin_on_both(one, two)
            two.engine.refuse_load = "no room"
            for _ in range(20):
                await two.pins.keep()
            two.engine.refuse_load = None
            for _ in range(4):
                await two.pins.keep()
            assert len(two.engine.known) == 1

    run(scenario)

from pathlib import Path

from loraserve.api.management.adapter_items import AdapterItems
from loraserve.api.schemas.adapters import AdapterDetail
from loraserve.control.tenancy.principal import Principal, server_principal
from loraserve.engine.request import EngineStats
from loraserve.store.records import Role, Tier
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, Node, run, running_node, with_tenants

__all__ = ["valkey"]

GLOBEX = server_principal("globex", "cli")
VIEWER = Principal("k", Role.VIEWER, "acme", "acme", "k")


async def shown(node: Node, viewer: Principal, name: str) -> AdapterDetail:
    items = AdapterItems(node.adapters, node.residency, str, clock=node.clock)
    return items.detail(viewer, await node.adapters.read(ACME, name))


async def use(node: Node, digest: str, tenant: str) -> None:
    async with node.residency.hold(digest, tenant=tenant):
        pass


def test_a_pin_shows_the_tier_of_the_content_but_not_its_use_by_other_tenants(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            digest = await node.publish("public", "the same", GLOBEX)
            await use(node, digest, "globex")
            assert await node.publish("copy", "the same") == digest
            assert (await shown(node, VIEWER, "copy")).tier is Tier.DISK
            await node.adapters.pin(ACME, "r", "copy", Tier.HOST, ttl_s=60)
            found = await shown(node, VIEWER, "copy")
            (version,) = found.versions
            assert (found.tier, version.tier, version.num_hits, version.last_used_at) == (Tier.HOST, Tier.HOST, 0, None)
            await use(node, digest, "acme")
            (version,) = (await shown(node, VIEWER, "copy")).versions
            assert (version.num_hits, version.last_used_at) == (1, node.clock.now)
            (version,) = (await shown(node, ACME, "copy")).versions
            assert version.num_hits == 2

    run(scenario)


def test_a_pin_shows_the_tier_only_of_the_pinned_version_until_it_expires(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            digests = [await node.publish("sql", text) for text in ("old", "live")]
            for digest in digests:
                await use(node, digest, "globex")
            node.engine.stats = EngineStats(resident_adapters=digests)
            await node.adapters.pin(ACME, "r", "sql", Tier.DEVICE, ttl_s=60)
            found = await shown(node, VIEWER, "sql")
            assert found.pin is not None
            assert [version.tier for version in found.versions] == [Tier.DEVICE, Tier.DISK]
            node.clock.now += 61
            found = await shown(node, VIEWER, "sql")
            assert (found.pin, found.tier) == (None, Tier.DISK)
            assert [version.tier for version in found.versions] == [Tier.DISK, Tier.DISK]

    run(scenario)

from pathlib import Path

from loraserve.control.contents.names import ContentNames
from loraserve.control.monitoring.live_views import LiveViews, NamedExtent, NamedQueue, RedisState
from loraserve.control.requests.snapshots import Snapshots
from loraserve.control.tenancy.principal import Principal, server_principal
from loraserve.engine.request import EngineStats, QueueStats
from loraserve.store.records import Role
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, Node, run, running_node, with_tenants

__all__ = ["valkey"]

GLOBEX = server_principal("globex", "cli")
SHARED = server_principal("shared", "cli")
ACME_VIEWER = Principal("k", Role.VIEWER, "acme", "acme", "k")
GLOBEX_VIEWER = Principal("k", Role.VIEWER, "globex", "globex", "k")


def snapshots_of(node: Node, process: str = "p", engine: str = "engine-0") -> Snapshots:
    unsettled = node.admission.unsettled
    return Snapshots(node.live, node.runtime, node.running, node.residency, unsettled, process=process, engine=engine)


async def busy_node(node: Node) -> list[str]:
    """The arena has acme's `sql`, globex's `poet` and `secret`, and the shared `upper`; all but `poet` are running."""
    await with_tenants(node)
    digests = [
        await node.publish("sql", "one"),
        await node.publish("poet", "two", GLOBEX),
        await node.publish("secret", "three", GLOBEX),
        await node.publish("upper", "four", SHARED),
    ]
    sql, poet, secret, upper = digests
    node.engine.stats = EngineStats(
        num_blocks=100,
        num_free_blocks=60,
        num_cached_blocks=10,
        arena_size_bytes=1000,
        arena_used_bytes=100,
        running_adapters=[sql, secret, upper],
        resident_adapters=[upper, secret, poet, sql],
        resident_extents=[(70, 30), (40, 20), (30, 10), (0, 30)],
        queues=[
            QueueStats("acme", sql, 1, 2, 30),
            QueueStats("acme", None, 1, 0, 0),
            QueueStats("globex", secret, 3, 1, 5),
            QueueStats("globex", upper, 0, 1, 4),
        ],
    )
    return digests


def test_a_tenant_sees_its_own_names_and_only_the_sum_of_others(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            sql, _, _, upper = await busy_node(node)
            snapshots = snapshots_of(node)
            await snapshots.publish()
            views = LiveViews(snapshots, ContentNames(node.catalog), node.outage)
            (view,) = await views.engines(ACME_VIEWER)
            assert view.extents == [
                NamedExtent(0, 30, True, sql, "acme", "sql", 1),
                NamedExtent(30, 30, True),
                # Only another tenant uses the shared one.
                NamedExtent(70, 30, False, upper, "shared", "upper", 1),
            ]
            assert view.queues == [
                NamedQueue("acme", None, 1, 0, 0),
                NamedQueue("acme", "sql", 1, 2, 30),
                NamedQueue(None, None, 3, 2, 9),
            ]
            assert "secret" not in repr(view.extents) + repr(view.queues)

    run(scenario)


def test_operators_of_all_tenants_see_every_name(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await busy_node(node)
            snapshots = snapshots_of(node)
            await snapshots.publish()
            (view,) = await LiveViews(snapshots, ContentNames(node.catalog), node.outage).engines(ADMIN)
            assert [(extent.offset_bytes, extent.adapter, extent.in_use) for extent in view.extents] == [
                (0, "sql", True),
                (30, "poet", False),
                (40, "secret", True),
                (70, "upper", True),
            ]
            assert [(queue.tenant, queue.adapter) for queue in view.queues] == [
                ("acme", None),
                ("acme", "sql"),
                ("globex", "secret"),
                ("globex", "upper"),
            ]

    run(scenario)


def test_each_tenant_sees_its_own_name_for_the_same_content(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            names = ContentNames(node.catalog)
            digest = await node.publish("mine", "same")
            await node.publish("theirs", "same", GLOBEX)
            for principal, expected in ((ACME_VIEWER, "mine"), (GLOBEX_VIEWER, "theirs")):
                found = names.name(principal, digest)
                assert found is not None
                assert found.adapter == expected
            listed = Principal("k", Role.VIEWER, "acme", "acme", "k", adapters=frozenset({"other"}))
            assert names.name(listed, digest) is None
            await node.adapters.delete(ACME, "r", "mine", drain_s=0)
            found = names.name(ACME_VIEWER, digest)
            assert found is not None
            assert found.is_deleted

    run(scenario)


def test_a_server_still_shows_itself_if_redis_is_full(valkey: Valkey, tmp_path: Path) -> None:
    """Its last report expires after five seconds, and Redis accepts no newer one."""

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await busy_node(node)
            views = LiveViews(snapshots_of(node), ContentNames(node.catalog), node.outage)
            node.outage.is_full = True
            (view,) = await views.engines(ADMIN)
            assert view.engine == "engine-0"
            assert views.redis is RedisState.FULL

    run(scenario)


def test_a_server_still_shows_itself_without_redis(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False, grace_s=5) as node:
            await busy_node(node)
            views = LiveViews(snapshots_of(node), ContentNames(node.catalog), node.outage)
            assert views.redis is RedisState.READY
            valkey.kill()
            node.outage.failed("no answer")
            (view,) = await views.engines(ADMIN)
            assert view.engine == "engine-0"
            assert views.redis is RedisState.GRACE
            node.steady.now += 6
            assert views.redis is RedisState.GONE

    run(scenario)

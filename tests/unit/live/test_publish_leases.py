from loraserve.live.live_store import LiveStore
from tests.unit.live.conftest import RunCheck


def test_one_holds_a_lease_until_it_releases_it(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        leases = store.publish_leases
        assert await leases.try_take("acme", "a")
        assert not await leases.try_take("acme", "b")
        assert await leases.try_take("globex", "b")
        assert await leases.release("acme", "a")
        assert await leases.try_take("acme", "b")

    on_any_server(check)


def test_whoever_is_alone_drops_all_leases_and_nothing_else(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        leases = store.publish_leases
        await leases.drop_all()
        for tenant in ("acme", "globex"):
            assert await leases.try_take(tenant, "killed")
        await store.connection.call("SET", "{ls}:l:k:key", "another lease")
        await leases.drop_all()
        assert await leases.try_take("acme", "next")
        assert await store.connection.call("GET", "{ls}:l:k:key") is not None

    on_any_server(check)


def test_a_lease_ends_by_itself_and_only_its_holder_ends_it_before(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        leases = store.publish_leases
        assert await leases.try_take("acme", "killed")
        assert 0 < await store.connection.call("PTTL", "{ls}:l:p:acme") <= 15_000
        # As when its time is over.
        await store.connection.call("DEL", "{ls}:l:p:acme")
        assert await leases.try_take("acme", "next")
        assert not await leases.release("acme", "killed")
        assert not await leases.try_take("acme", "third")
        assert await leases.release("acme", "next")
        assert not await leases.release("acme", "next")

    on_any_server(check)

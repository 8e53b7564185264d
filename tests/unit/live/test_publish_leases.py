from loraserve.live.live_store import LiveStore
from tests.unit.live.conftest import RunCheck


def test_a_lease_is_exclusive_per_tenant_until_its_holder_releases_it(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        leases = store.publish_leases
        assert await leases.try_take("acme", "a")
        assert not await leases.try_take("acme", "b")
        assert await leases.try_take("globex", "b")
        assert await leases.release("acme", "a")
        assert await leases.try_take("acme", "b")

    on_any_server(check)


def test_drop_all_removes_all_publish_leases_and_nothing_else(on_any_server: RunCheck) -> None:
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


def test_a_lease_expires_and_only_its_holder_can_release_it_earlier(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        leases = store.publish_leases
        assert await leases.try_take("acme", "killed")
        assert 0 < await store.connection.call("PTTL", "{ls}:l:p:acme") <= 15_000
        # As if it had expired.
        await store.connection.call("DEL", "{ls}:l:p:acme")
        assert await leases.try_take("acme", "next")
        assert not await leases.release("acme", "killed")
        assert not await leases.try_take("acme", "third")
        assert await leases.release("acme", "next")
        assert not await leases.release("acme", "next")

    on_any_server(check)

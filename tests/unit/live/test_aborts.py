from loraserve.live.live_store import LiveStore
from tests.unit.live.conftest import RunCheck


def test_each_process_takes_its_abort_requests_once(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        assert await store.aborts.take("p1") == []
        for request_id in ("r1", "r2", "r1"):
            await store.aborts.request("p1", request_id)
        await store.aborts.request("p2", "r3")
        assert sorted(await store.aborts.take("p1")) == ["r1", "r2"]
        assert await store.aborts.take("p1") == []
        assert await store.aborts.take("p2") == ["r3"]

    on_any_server(check)

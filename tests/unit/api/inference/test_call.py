import time
from pathlib import Path
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st

from loraserve.api.http.processing_time import STATE_KEY
from loraserve.api.inference.call import Demand, salted
from loraserve.control.requests.running import Asked
from loraserve.control.tenancy.principal import server_principal
from loraserve.store.records import DEFAULT_TENANT
from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import LiveServer, live_server, make_settings

SALTS = st.tuples(st.text(max_size=8), st.text(max_size=8))
BEFORE_S = 60.0


@given(SALTS, SALTS)
def test_no_two_pairs_of_salts_are_one(first: tuple[str, str], second: tuple[str, str]) -> None:
    assert (salted(*first) == salted(*second)) == (first == second)


async def end_at_once(live: LiveServer, received_s: float) -> None:
    scope: Any = {"headers": [], "state": {STATE_KEY: received_s}}
    principal = server_principal(DEFAULT_TENANT, "open")
    target = await live.control.resolver.resolve(principal, "tiny")
    async with live.context.calls.admit(principal, target, scope, Demand(1, 1, Asked())) as call:
        call.close()
    await live.context.calls.wait_settled()


def test_a_requests_time_is_from_its_arrival_not_from_its_admission(tmp_path: Path) -> None:
    """As its TTFT is, which could be longer than all of it otherwise."""
    with live_server(FakeEngine(), make_settings(tmp_path)) as live:
        live.run(end_at_once(live, time.monotonic() - BEFORE_S))
        (record,) = httpx.get(f"{live.url}/v1/requests").json()["data"]
    assert record["duration_ms"] >= BEFORE_S * 1000
    assert record["at"] <= time.time() - BEFORE_S

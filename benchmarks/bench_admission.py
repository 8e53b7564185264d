"""Time of `admit` and `finish` as a request sees them: one private Valkey on a unix socket, `--callers` at a time.

    python benchmarks/bench_admission.py [--calls 3000] [--callers 1]

Prints one JSON line: milliseconds per call, and microseconds per call inside the server.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from loraserve.live.admission_records import AdmitCall, FinishCall, LiveAdmitted
from loraserve.live.leases import Lease
from loraserve.live.live_store import LiveStore
from loraserve.live.private_server import PrivateServer
from loraserve.live.requests import EndedRequest, EndState
from loraserve.store.records import Document, DocumentKind, KeyDoc, Limits, Role, TenantDoc

LIMITS = Limits(requests_per_min=10**8, tokens_per_min=10**9, max_concurrent=10**4)


async def measure(num_calls: int, num_callers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        async with PrivateServer(Path(folder)) as server:
            store = LiveStore(server.url)
            try:
                return await measure_store(store, num_calls, num_callers)
            finally:
                await store.close()


async def measure_store(store: LiveStore, num_calls: int, num_callers: int) -> dict[str, float]:
    mark = await store.view.begin()
    tenant = Document(
        kind=DocumentKind.TENANT,
        id="acme",
        rev=1,
        at=0.0,
        actor="bench",
        action="create",
        request_id="",
        doc=TenantDoc(kv_salt="salt", limits=LIMITS),
    )
    key = Document(
        kind=DocumentKind.KEY,
        id="k1",
        rev=1,
        at=0.0,
        actor="bench",
        action="create",
        request_id="",
        doc=KeyDoc(tenant="acme", role=Role.INFER, sha256="0" * 64, created_at=0.0, limits=LIMITS),
    )
    await store.documents.put(tenant)
    await store.documents.put(key)
    assert await store.view.accept(mark)

    async def admit(lease: Lease) -> None:
        call = AdmitCall(
            lease=lease, tenant_rev=1, key_rev=1, tenant_limits=LIMITS, key_limits=LIMITS, reserve_tokens=300
        )
        reply = await store.admission.admit(call)
        assert isinstance(reply, LiveAdmitted), reply

    async def finish(lease: Lease) -> None:
        request = EndedRequest(request_id=lease.request_id, tenant="acme", state=EndState.COMPLETED, at=0.0)
        await store.admission.finish(
            FinishCall(lease=lease, request=request, unused_tokens=50, tenant_limits=LIMITS, key_limits=LIMITS)
        )

    await run_calls(admit, finish, 200, num_callers, "warm")
    await store.connection.call("CONFIG", "RESETSTAT")
    times = await run_calls(admit, finish, num_calls, num_callers, "run")
    stats = (await store.connection.call("INFO", "commandstats")).decode()
    evalsha = next(line for line in stats.splitlines() if line.startswith("cmdstat_evalsha:"))
    fields = dict(pair.split("=") for pair in evalsha.partition(":")[2].split(","))
    return {
        **{f"{name}_{label}_ms": value for name, values in times.items() for label, value in summary(values).items()},
        "server_us_per_call": float(fields["usec_per_call"]),
    }


async def run_calls(
    admit: Callable[[Lease], Awaitable[None]],
    finish: Callable[[Lease], Awaitable[None]],
    num_calls: int,
    num_callers: int,
    name: str,
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"admit": [], "finish": []}

    async def caller(index: int) -> None:
        for i in range(num_calls // num_callers):
            lease = Lease(request_id=f"{name}-{index}-{i}", process="p", tenant="acme", key_id="k1")
            start = time.perf_counter()
            await admit(lease)
            admitted = time.perf_counter()
            await finish(lease)
            times["admit"].append(admitted - start)
            times["finish"].append(time.perf_counter() - admitted)

    await asyncio.gather(*(caller(index) for index in range(num_callers)))
    return times


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": round(ordered[len(ordered) // 2] * 1e3, 4),
        "p99": round(ordered[len(ordered) * 99 // 100] * 1e3, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--callers", type=int, default=1)
    options = parser.parse_args()
    result = uvloop.run(measure(options.calls, options.callers))
    print(json.dumps({"calls": options.calls, "callers": options.callers, **result}))


if __name__ == "__main__":
    main()

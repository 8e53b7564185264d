import pytest
from msgspec.structs import replace

from loraserve.live.admission_records import (
    AdmitCall,
    AlreadyEnded,
    Limited,
    LiveAdmitted,
    Measure,
    Scope,
    Stale,
    Used,
    ViewChanged,
)
from loraserve.live.live_store import LiveStore
from loraserve.live.requests import EndState
from loraserve.store.records import Limits
from tests.support.live_documents import (
    adapter_document,
    admit_call,
    build_usual_view,
    build_view,
    finish_call,
    key_document,
    num_in_flight,
    tenant_document,
)
from tests.support.valkey import Valkey
from tests.unit.live.conftest import RunCheck

POET = Used(id="acme/poet", rev=1)


async def admitted(store: LiveStore, call: AdmitCall) -> LiveAdmitted:
    reply = await store.admission.admit(call)
    assert isinstance(reply, LiveAdmitted), reply
    return reply


async def limited(store: LiveStore, call: AdmitCall) -> Limited:
    reply = await store.admission.admit(call)
    assert isinstance(reply, Limited), reply
    return reply


def test_a_request_without_limits_is_admitted_and_no_limits_are_returned(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        reply = await admitted(store, admit_call(adapter=POET))
        assert (reply.requests, reply.tokens) == (None, None)
        assert await num_in_flight(store) == 1
        assert await num_in_flight(store, "acme") == 1

    on_any_server(check)


def test_the_tighter_limit_of_key_and_tenant_is_returned(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        call = admit_call(
            tenant_limits=Limits(requests_per_min=5, tokens_per_min=10_000),
            key_limits=Limits(requests_per_min=100, tokens_per_min=600),
        )
        reply = await admitted(store, call)
        assert reply.requests is not None
        assert reply.tokens is not None
        assert (reply.requests.limit, reply.requests.remaining) == (5, 4)
        assert (reply.tokens.limit, reply.tokens.remaining) == (600, 500)
        assert 9_000 < reply.tokens.reset_ms <= 10_000

    on_any_server(check)


@pytest.mark.parametrize(
    ("newer", "scope"),
    [
        (tenant_document(rev=2), Scope.TENANT),
        (key_document(rev=2), Scope.KEY),
        (adapter_document(rev=2), Scope.ADAPTER),
    ],
)
def test_a_newer_revision_of_each_document_makes_the_call_stale(on_any_server: RunCheck, newer, scope: Scope) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        await store.documents.put(newer)
        assert await store.admission.admit(admit_call(adapter=POET)) == Stale(scopes=[scope])
        assert await num_in_flight(store) == 0

    on_any_server(check)


def test_documents_missing_in_redis_are_stale(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        reply = await store.admission.admit(admit_call(adapter=POET))
        assert reply == Stale(scopes=[Scope.TENANT, Scope.KEY, Scope.ADAPTER])

    on_any_server(check)


def test_a_call_without_key_and_adapter_checks_the_tenant_only(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store, tenant_document())
        await admitted(store, admit_call(key_id=None))

    on_any_server(check)


def test_the_adapter_revision_is_checked_for_a_request_without_a_key(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store, tenant_document(), adapter_document(rev=2))
        assert await store.admission.admit(admit_call(key_id=None, adapter=POET)) == Stale(scopes=[Scope.ADAPTER])
        await admitted(store, admit_call(key_id=None, adapter=Used(id="acme/poet", rev=2)))

    on_any_server(check)


@pytest.mark.parametrize("scope", [Scope.TENANT, Scope.KEY])
def test_requests_per_minute_are_limited_in_each_scope(on_any_server: RunCheck, scope: Scope) -> None:
    limits = Limits(requests_per_min=3)

    def call(request_id: str) -> AdmitCall:
        if scope is Scope.TENANT:
            return admit_call(request_id, tenant_limits=limits)
        return admit_call(request_id, key_limits=limits)

    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        for index in range(3):
            await admitted(store, call(f"r{index}"))
        reply = await limited(store, call("r3"))
        assert (reply.scope, reply.measure, reply.limit) == (scope, Measure.REQUESTS, 3)
        assert reply.retry_ms is not None
        assert 15_000 < reply.retry_ms <= 20_000

    on_any_server(check)


def test_a_refused_request_takes_no_tokens_from_any_bucket_and_no_lease(on_any_server: RunCheck) -> None:
    tight = Limits(requests_per_min=1)
    wide = Limits(requests_per_min=1000, tokens_per_min=100_000)

    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        first = await admitted(store, admit_call("r0", tenant_limits=wide, key_limits=tight))
        assert first.tokens is not None
        for index in range(5):
            await limited(store, admit_call(f"r{index + 1}", tenant_limits=wide, key_limits=tight))
        assert await num_in_flight(store) == 1
        after = await admitted(store, admit_call("r9", tenant_limits=wide))
        assert after.requests is not None
        assert after.requests.remaining == 998

    on_any_server(check)


def test_the_limit_with_the_longest_wait_is_reported(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        limits = Limits(requests_per_min=1, tokens_per_min=60)
        await admitted(store, admit_call("r0", reserve=60, tenant_limits=limits))
        reply = await limited(store, admit_call("r1", reserve=30, tenant_limits=limits))
        assert reply.measure is Measure.REQUESTS
        assert reply.retry_ms is not None
        assert 55_000 < reply.retry_ms <= 60_000
        reply = await limited(
            store, admit_call("r1", reserve=30, tenant_limits=limits, key_limits=Limits(max_concurrent=0))
        )
        assert (reply.measure, reply.retry_ms) == (Measure.CONCURRENT, None)

    on_any_server(check)


@pytest.mark.parametrize(
    "limits",
    [Limits(requests_per_min=0), Limits(tokens_per_min=0), Limits(max_concurrent=0)],
)
def test_a_limit_of_zero_refuses_without_a_retry_time(on_any_server: RunCheck, limits: Limits) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        reply = await limited(store, admit_call(reserve=0, key_limits=limits))
        assert (reply.limit, reply.retry_ms) == (0, None)

    on_any_server(check)


def test_concurrency_counts_leases_and_finishing_frees_one(on_any_server: RunCheck) -> None:
    limits = Limits(max_concurrent=2)

    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        calls = [admit_call(f"r{index}", tenant_limits=limits) for index in range(3)]
        await admitted(store, calls[0])
        await admitted(store, calls[1])
        reply = await limited(store, calls[2])
        assert (reply.scope, reply.measure) == (Scope.TENANT, Measure.CONCURRENT)
        await store.admission.finish(finish_call(calls[0]))
        await admitted(store, calls[2])

    on_any_server(check)


def test_a_repeated_admission_of_the_same_request_is_charged_once(on_any_server: RunCheck) -> None:
    limits = Limits(requests_per_min=1, tokens_per_min=100, max_concurrent=1)

    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        for _ in range(2):
            await admitted(store, admit_call(tenant_limits=limits, key_limits=limits))
        assert await num_in_flight(store) == 1
        refused = await limited(store, admit_call("r2", reserve=100, tenant_limits=replace(limits, max_concurrent=9)))
        assert refused.retry_ms is not None
        assert refused.retry_ms <= 60_000  # the wait for one request and its tokens, not two

    on_any_server(check)


def test_a_reserve_larger_than_a_full_bucket_is_admitted_and_leaves_a_debt(on_any_server: RunCheck) -> None:
    limits = Limits(tokens_per_min=1000)

    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        reply = await admitted(store, admit_call("r0", reserve=3000, tenant_limits=limits))
        assert reply.tokens is not None
        assert reply.tokens.remaining == 0
        refused = await limited(store, admit_call("r1", reserve=1, tenant_limits=limits))
        assert refused.retry_ms is not None
        assert 115_000 < refused.retry_ms <= 121_000

    on_any_server(check)


def test_unused_tokens_are_refunded_and_never_overfill_the_bucket(on_any_server: RunCheck) -> None:
    limits = Limits(tokens_per_min=1000)

    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        call = admit_call("r0", reserve=1000, tenant_limits=limits)
        await admitted(store, call)
        await store.admission.finish(finish_call(call, unused=900))
        reply = await admitted(store, admit_call("r1", reserve=0, tenant_limits=limits))
        assert reply.tokens is not None
        assert 900 <= reply.tokens.remaining < 1000
        other = admit_call("r2", reserve=0, tenant_limits=limits)
        await admitted(store, other)
        await store.admission.finish(finish_call(other, unused=10**6))
        higher = replace(limits, tokens_per_min=1_000_000)
        reply = await admitted(store, admit_call("r3", reserve=0, tenant_limits=higher))
        assert reply.tokens is not None
        assert 1000 <= reply.tokens.remaining < 100_000

    on_any_server(check)


def test_tokens_used_beyond_the_reserve_become_a_debt(on_any_server: RunCheck) -> None:
    limits = Limits(tokens_per_min=600)

    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        call = admit_call("r0", reserve=600, key_limits=limits)
        await admitted(store, call)
        await store.admission.finish(finish_call(call, unused=-600))
        refused = await limited(store, admit_call("r1", reserve=10, key_limits=limits))
        assert refused.retry_ms is not None
        assert 55_000 < refused.retry_ms <= 61_000

    on_any_server(check)


def test_only_the_first_finish_of_a_request_sets_its_state_and_refunds_tokens(on_any_server: RunCheck) -> None:
    limits = Limits(tokens_per_min=60_000)

    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        call = admit_call(reserve=50_000, tenant_limits=limits)
        await admitted(store, call)
        first = await store.admission.finish(finish_call(call, unused=10_000, state=EndState.ABORTED))
        assert (first.was_first, first.request.state) == (True, EndState.ABORTED)
        second = await store.admission.finish(finish_call(call, unused=10_000))
        assert (second.was_first, second.request.state) == (False, EndState.ABORTED)
        reply = await admitted(store, admit_call("r2", reserve=0, tenant_limits=limits))
        assert reply.tokens is not None
        assert 20_000 <= reply.tokens.remaining < 25_000

    on_any_server(check)


def test_an_admission_that_arrives_after_its_abort_takes_nothing(on_any_server: RunCheck) -> None:
    limits = Limits(requests_per_min=10)

    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        call = admit_call(tenant_limits=limits)
        await store.admission.finish(finish_call(call, state=EndState.ABORTED, was_admitted=False))
        reply = await store.admission.admit(call)
        assert isinstance(reply, AlreadyEnded)
        assert reply.request.state is EndState.ABORTED
        assert await num_in_flight(store) == 0
        assert (await admitted(store, admit_call("r2", tenant_limits=limits))).requests.remaining == 9

    on_any_server(check)


def test_an_abort_refunds_only_tokens_that_were_taken(on_any_server: RunCheck) -> None:
    limits = Limits(tokens_per_min=6000)

    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        await admitted(store, admit_call("r0", reserve=5000, tenant_limits=limits))
        never_in = admit_call("r1", reserve=5000, tenant_limits=limits)
        await store.admission.finish(finish_call(never_in, unused=5000, state=EndState.ABORTED, was_admitted=False))
        reply = await admitted(store, admit_call("r2", reserve=0, tenant_limits=limits))
        assert reply.tokens is not None
        assert reply.tokens.remaining < 1500
        assert await store.requests.recent("acme", 10) == []
        was_in = admit_call("r0", reserve=5000, tenant_limits=limits)
        await store.admission.finish(finish_call(was_in, unused=5000, state=EndState.ABORTED, was_admitted=False))
        reply = await admitted(store, admit_call("r3", reserve=0, tenant_limits=limits))
        assert reply.tokens is not None
        assert reply.tokens.remaining > 5900

    on_any_server(check)


def test_admission_requires_an_accepted_view(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        assert await store.admission.admit(admit_call()) == ViewChanged()
        await build_usual_view(store)
        await admitted(store, admit_call())
        await store.connection.call("FLUSHALL")
        assert await store.admission.admit(admit_call("r2")) == ViewChanged()
        assert store.view.accepted is None

    on_any_server(check)


def test_a_view_rebuilt_by_another_process_makes_the_accepted_one_outdated(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        known = store.view.accepted
        await store.connection.call("FLUSHALL")
        await build_usual_view(store)
        store.view._accepted = known
        assert await store.admission.admit(admit_call()) == ViewChanged()

    on_any_server(check)


def test_a_redis_out_of_memory_still_admits_and_finishes_requests(any_server: Valkey, on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        assert any_server.command("CONFIG", "SET", "maxmemory", "1") == "+OK\r\n"
        call = admit_call(adapter=POET)
        await admitted(store, call)
        assert (await store.admission.finish(finish_call(call))).was_first
        assert await num_in_flight(store) == 0

    try:
        on_any_server(check)
    finally:
        assert any_server.command("CONFIG", "SET", "maxmemory", "0") == "+OK\r\n"


def test_a_call_with_a_key_but_without_its_revision_raises_value_error(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        with pytest.raises(ValueError, match="both or neither"):
            await store.admission.admit(
                AdmitCall(lease=admit_call().lease, tenant_rev=1, key_rev=None, reserve_tokens=1)
            )

    on_server(check)

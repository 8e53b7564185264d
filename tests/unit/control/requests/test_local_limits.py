from loraserve.control.requests.local_limits import LocalLimits
from loraserve.live.admission_records import Limited, Measure, Scope
from loraserve.store.records import DocumentKind, Limits
from tests.unit.control.nodes import Clock

KEY = (DocumentKind.KEY, "a")
TENANT = (DocumentKind.TENANT, "t")


def test_local_limits_refill_and_go_into_debt() -> None:
    clock = Clock(0.0)
    local = LocalLimits(clock=clock)
    scopes = [(TENANT, Limits(requests_per_min=2, tokens_per_min=600), 0), (KEY, Limits(max_concurrent=1), 0)]
    assert local.try_take(scopes, 600) is None
    limited = local.try_take(scopes, 60)
    assert limited == Limited(scope=Scope.TENANT, measure=Measure.TOKENS, limit=600, retry_ms=6000)
    local.give_back([TENANT, KEY], -60)
    clock.now = 6.0
    assert local.try_take(scopes, 60) is not None
    clock.now = 12.0
    assert local.try_take(scopes, 60) is None
    busy = local.try_take([(KEY, Limits(max_concurrent=1), 1)], 1)
    assert busy == Limited(scope=Scope.KEY, measure=Measure.CONCURRENT, limit=1, retry_ms=1000)
    never = local.try_take([(KEY, Limits(requests_per_min=0), 0)], 1)
    assert never == Limited(scope=Scope.KEY, measure=Measure.REQUESTS, limit=0, retry_ms=None)
    idle = local.try_take([(KEY, Limits(max_concurrent=0), 0)], 1)
    assert idle == Limited(scope=Scope.KEY, measure=Measure.CONCURRENT, limit=0, retry_ms=None)

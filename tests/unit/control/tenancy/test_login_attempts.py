import pytest

from loraserve.control.tenancy.login_attempts import MAX_ADDRESSES, MAX_FAILURES, WINDOW_S, LoginAttempts
from loraserve.serving.errors import ErrorCode, ServingError
from tests.support.clock import Clock


def test_an_address_that_fails_too_often_waits_until_its_oldest_failure_is_forgotten() -> None:
    clock = Clock()
    attempts = LoginAttempts(clock=clock)
    for _ in range(MAX_FAILURES):
        attempts.failed("1.2.3.4")
        clock.now += 1
    with pytest.raises(ServingError) as refused:
        attempts.failed("1.2.3.4")
    assert refused.value.code is ErrorCode.RATE_LIMITED
    assert refused.value.retry_after_s == WINDOW_S - MAX_FAILURES
    attempts.failed("5.6.7.8")
    clock.now += refused.value.retry_after_s
    attempts.failed("1.2.3.4")


def test_memory_is_bounded() -> None:
    attempts = LoginAttempts(clock=Clock())
    for _ in range(MAX_FAILURES):
        attempts.failed("first")
    for number in range(MAX_ADDRESSES):
        attempts.failed(str(number))
    attempts.failed("first")

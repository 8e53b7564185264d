import pytest

from loraserve.control.tenancy.login_attempts import (
    LOGINS_WINDOW_S,
    MAX_FAILURES,
    MAX_LOGINS,
    MAX_REMEMBERED,
    WINDOW_S,
    LoginAttempts,
)
from loraserve.serving.errors import ErrorCode, ServingError
from tests.support.clock import Clock


def test_an_address_that_fails_too_often_waits_until_its_oldest_failure_expires() -> None:
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


def test_a_key_that_logs_in_too_often_has_to_wait_but_other_keys_do_not() -> None:
    clock = Clock()
    attempts = LoginAttempts(clock=clock)
    for _ in range(MAX_LOGINS):
        attempts.logs_in("k1")
        clock.now += 1
    with pytest.raises(ServingError) as refused:
        attempts.logs_in("k1")
    assert refused.value.code is ErrorCode.RATE_LIMITED
    assert refused.value.retry_after_s == LOGINS_WINDOW_S - MAX_LOGINS
    attempts.logs_in("k2")
    clock.now += refused.value.retry_after_s
    attempts.logs_in("k1")


def test_the_least_recently_seen_addresses_are_forgotten_above_the_limit() -> None:
    attempts = LoginAttempts(clock=Clock())
    for _ in range(MAX_FAILURES):
        attempts.failed("first")
    for number in range(MAX_REMEMBERED):
        attempts.failed(str(number))
    attempts.failed("first")

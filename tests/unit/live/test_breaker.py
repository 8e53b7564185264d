from loraserve.live.breaker import Breaker
from tests.support.clock import Clock


def test_lets_every_caller_through_while_closed() -> None:
    breaker = Breaker(Clock())
    assert [breaker.seconds_to_wait() for _ in range(3)] == [0, 0, 0]


def test_lets_one_caller_per_second_through_while_open() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed("gone")
    assert breaker.seconds_to_wait() == 1.0
    clock.now += 1.0
    assert breaker.seconds_to_wait() == 0.0
    assert breaker.seconds_to_wait() == 1.0


def test_closes_when_a_probe_succeeds() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed("gone")
    clock.now += 1.0
    assert breaker.seconds_to_wait() == 0.0
    breaker.succeeded()
    assert breaker.seconds_to_wait() == 0.0
    assert breaker.seconds_to_wait() == 0.0


def test_counts_the_outage_from_its_first_failure() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed("gone")
    clock.now += 5.0
    breaker.failed("still gone")
    assert (breaker.down_since, breaker.reason) == (100.0, "still gone")

"""When requests are sent."""

from itertools import accumulate
from random import Random


def arrival_times_s(count: int, request_rate: float | None, cv: float, random: Random) -> list[float]:
    """After the start; all 0 without a rate.

    The gaps are Gamma distributed with mean 1 / request_rate and coefficient of variation cv: 0 is evenly spaced, 1 a
    Poisson process, above 1 bursts.
    """
    if request_rate is None:
        return [0.0] * count
    if cv == 0:
        return [(i + 1) / request_rate for i in range(count)]
    shape, scale = cv**-2, cv**2 / request_rate
    return list(accumulate(random.gammavariate(shape, scale) for _ in range(count)))

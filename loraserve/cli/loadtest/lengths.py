"""Distributions of prompt and output lengths."""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from random import Random
from statistics import NormalDist
from typing import Protocol


class LengthLaw(StrEnum):
    UNIFORM = "uniform"
    NORMAL = "normal"
    SHAREGPT = "sharegpt"


class Lengths(Protocol):
    def draw(self, random: Random) -> int:
        """At least 1 token."""
        ...


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Uniform over mean - spread … mean + spread."""

    mean: int
    spread: int = 0

    def draw(self, random: Random) -> int:
        return max(1, random.randint(self.mean - self.spread, self.mean + self.spread))


@dataclass(frozen=True, slots=True)
class NormalLengths:
    """Normal with this mean and standard deviation, before lengths below 1 are raised to 1."""

    mean: int
    deviation: int

    def draw(self, random: Random) -> int:
        return max(1, round(random.gauss(self.mean, self.deviation)))


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """A long tail: exp of a normal with deviation sigma, cut, with this mean."""

    mean: int
    sigma: float

    MAX_SHARE = 6
    """Lengths above this many means are drawn again, so that one request does not dominate a short test."""

    def draw(self, random: Random) -> int:
        most = self.MAX_SHARE * self.mean
        mu = _mu_when_cut(self.mean, self.sigma, most)
        while (length := random.lognormvariate(mu, self.sigma)) > most:
            pass
        return max(1, round(length))


@cache
def _mu_when_cut(mean: float, sigma: float, most: float) -> float:
    """mu of the lognormal with this mean once values above `most` are drawn again; its uncut mean is larger."""
    cdf = NormalDist().cdf
    low, high = math.log(mean) - sigma**2 / 2, math.log(most)
    for _ in range(50):
        mu = (low + high) / 2
        end = (math.log(most) - mu) / sigma
        if math.exp(mu + sigma**2 / 2) * cdf(end - sigma) / cdf(end) < mean:
            low = mu
        else:
            high = mu
    return low


SHAREGPT_PROMPT = LognormalLengths(161, 1.2)
"""The means are those of vLLM's paper (SOSP'23, figure 11); the deviations are our choice of a long tail."""
SHAREGPT_OUTPUT = LognormalLengths(338, 0.9)

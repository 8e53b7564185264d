"""How long prompts and outputs are."""

import math
from dataclasses import dataclass
from enum import StrEnum
from random import Random
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
    """Over mean - spread … mean + spread."""

    mean: int
    spread: int = 0

    def draw(self, random: Random) -> int:
        return max(1, random.randint(self.mean - self.spread, self.mean + self.spread))


@dataclass(frozen=True, slots=True)
class NormalLengths:
    """With this mean and standard deviation, before those below 1 are raised to 1."""

    mean: int
    deviation: int

    def draw(self, random: Random) -> int:
        return max(1, round(random.gauss(self.mean, self.deviation)))


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """A long tail: exp of a normal with deviation sigma, scaled to this mean, then cut."""

    mean: int
    sigma: float

    MAX_SHARE = 6
    """Longer than this many means is drawn again, so that a short test is not one request."""

    def draw(self, random: Random) -> int:
        mu = math.log(self.mean) - self.sigma**2 / 2
        while (length := random.lognormvariate(mu, self.sigma)) > self.MAX_SHARE * self.mean:
            pass
        return max(1, round(length))


SHAREGPT_PROMPT = LognormalLengths(161, 1.2)
"""The means are those of vLLM's paper (SOSP'23, figure 11); the deviations are our choice of a long tail."""
SHAREGPT_OUTPUT = LognormalLengths(338, 0.9)

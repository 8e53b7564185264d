"""Chooses the model of each request."""

from enum import StrEnum
from random import Random


class Distribution(StrEnum):
    """How requests spread over models."""

    ROUND_ROBIN = "round-robin"
    UNIFORM = "uniform"
    ZIPF = "zipf"
    POWER = "power"


def choose_models(
    models: list[str], count: int, distribution: Distribution, random: Random, *, zipf_s: float, power_alpha: float
) -> list[str]:
    """ZIPF chooses the k-th model, from 1, in proportion to k ** -zipf_s; POWER follows S-LoRA's power law.

    In S-LoRA's traces, a position x in 0 … 1 of the list is drawn with density alpha * x ** (alpha - 1): alpha 1 is
    uniform, below 1 favors the first models.
    """
    match distribution:
        case Distribution.ROUND_ROBIN:
            return [models[i % len(models)] for i in range(count)]
        case Distribution.UNIFORM:
            return random.choices(models, k=count)
        case Distribution.ZIPF:
            weights = [(i + 1) ** -zipf_s for i in range(len(models))]
            return random.choices(models, weights, k=count)
        case Distribution.POWER:
            return [models[int(random.random() ** (1 / power_alpha) * len(models))] for _ in range(count)]

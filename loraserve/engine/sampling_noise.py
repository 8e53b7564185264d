"""Counter-based noise: one uniform per (seed, position), without generator state.

What a sequence draws does not depend on its batch, its row, a preemption or the process it runs in.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UINT64_MASK = (1 << 64) - 1


def splitmix64(state: NDArray[np.uint64], index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Output number `index` (from 0) of the SplitMix64 generator started at `state` (Steele et al., OOPSLA 2014)."""
    mixed = state + (index + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per (seed, position); any Python integers, taken modulo 2^64.

    The seed is hashed first, so the streams of seeds 0, 1, 2, ... start at unrelated places.
    """
    seed_words = np.array([seed & _UINT64_MASK for seed in seeds], dtype=np.uint64)
    position_words = np.array([position & _UINT64_MASK for position in positions], dtype=np.uint64)
    bits = splitmix64(splitmix64(seed_words, np.zeros_like(seed_words)), position_words)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

"""Counter-based noise: one uniform per (seed, position), without generator state.

A sequence's draws do not depend on its batch, its row, preemption or the process it runs in.
"""

_MASK = (1 << 64) - 1


def splitmix64(state: int, index: int) -> int:
    """Output number `index` (from 0) of the SplitMix64 generator started at `state` (Steele et al., OOPSLA 2014)."""
    mixed = (state + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. seed, position: any integers, taken modulo 2^64.

    The seed is hashed first, so the streams of seeds 0, 1, 2, ... start at unrelated places.
    """
    return (splitmix64(splitmix64(seed & _MASK, 0), position & _MASK) >> 11) * 2.0**-53

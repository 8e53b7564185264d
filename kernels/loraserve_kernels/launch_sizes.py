"""Tile counts and sizes, computed on the host for kernel launches.

`triton.cdiv` and `triton.next_power_of_2` return the same, but take 2 us a call in Triton 3.6 and 3.9, as does every
function that kernels may also call with constants; a layer with LoRA makes 34 such calls.
"""


def ceil_div(size: int, tile: int) -> int:
    """Number of tiles that cover size."""
    return -(-size // tile)


def power_of_2(size: int) -> int:
    """The smallest power of two that is not below size; size is at least 1."""
    return 1 << (size - 1).bit_length()

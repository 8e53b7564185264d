"""How many tiles, and how wide: for the host, where it launches kernels.

`triton.cdiv` and `triton.next_power_of_2` give the same there, but take 2 us a call in Triton 3.6 and 3.9, as all that
may be a constant of a kernel; a layer with LoRA makes 34 such calls.
"""


def ceil_div(size: int, tile: int) -> int:
    """Tiles that hold so many."""
    return -(-size // tile)


def power_of_2(size: int) -> int:
    """The smallest one that is not below size, which is at least 1."""
    return 1 << (size - 1).bit_length()

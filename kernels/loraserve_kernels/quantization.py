"""What the weights of linears can be rounded to."""

from enum import StrEnum

INT4_GROUP = 32
"""Weights of an output, one after the other, that share a scale."""
_INT8_SCALE_BYTES = 4
_INT4_SCALE_BYTES = 2


class Quantization(StrEnum):
    INT8 = "int8"
    """Multiples of a 127th of the largest weight of their output: a byte each."""
    INT4 = "int4"
    """-8 to 7 times a scale of five binary digits, which is chosen for each 32 weights of an output so that squares of
    what is rounded off are least: four bits each, and two bytes for a scale. All are exact in bfloat16."""

    def row_bytes(self, depth: int) -> int:
        """Bytes of the weights of an output, without what pads them."""
        if self is Quantization.INT8:
            return depth + _INT8_SCALE_BYTES
        return -(-depth // INT4_GROUP) * (INT4_GROUP // 2 + _INT4_SCALE_BYTES)

    def group_size(self, depth: int) -> int:
        """Weights of an output that share a scale."""
        return depth if self is Quantization.INT8 else INT4_GROUP

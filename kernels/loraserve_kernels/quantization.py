"""Forms in which the weights of linears take few bits."""

from enum import StrEnum

GROUP = 32
"""Weights of an output, one after the other, that have a scale of their own in four bits."""
WIDE_GROUP = 128
"""Likewise, of forms that have so many."""
NF4_BLOCK = 64
"""Weights of an output, one after the other, of which NF4 has the largest."""
_INT8_SCALE_BYTES = 4
_GROUP_SCALE_BYTES = 2
_ZERO_POINT_BYTES = 1


class Quantization(StrEnum):
    INT8 = "int8"
    """Multiples of a 127th of the largest weight of their output: a byte each."""
    INT4 = "int4"
    """-8 to 7 times a scale of five binary digits, which is chosen for each 32 weights of an output so that squares of
    what is rounded off are least: four bits each, and two bytes for a scale. All are exact in bfloat16."""
    MXFP4 = "mxfp4"
    """0, 1, 2, 3, 4, 6, 8 or 12 times a power of two for each 32 weights of an output, or minus that: four bits each,
    and two bytes for a scale. gpt-oss has its experts so, compressed-tensors linears (OCP's Microscaling Formats)."""
    NF4 = "nf4"
    """-2048, -1426, …, 1481 or 2048 times a 2048th of the largest of each `NF4_BLOCK` weights of an output, as bfloat16
    has it: four bits each, and two bytes for each 32. They are what the 16 levels of bitsandbytes' NF4 are nearest to,
    at most 0.024 % of the largest weight away."""
    UINT4 = "uint4"
    """0 to 15, less a zero point, times a scale, both for each 32 weights of an output, or for more of them: four bits
    each, two bytes for a scale, which has bfloat16's digits, and one for a zero point. GPTQ, AWQ and compressed-tensors
    have weights so."""
    UINT4_G128 = "uint4_g128"
    """The same for each 128 weights, or for more of them."""

    def row_bytes(self, depth: int) -> int:
        """Bytes of the weights of an output, without what pads them."""
        if self is Quantization.INT8:
            return depth + _INT8_SCALE_BYTES
        size, zero_point_bytes = self.group_size(depth), _ZERO_POINT_BYTES if self.has_zero_points else 0
        return -(-depth // size) * (size // 2 + _GROUP_SCALE_BYTES + zero_point_bytes)

    def group_size(self, depth: int) -> int:
        """Weights of an output that have a scale together."""
        if self is Quantization.INT8:
            return depth
        return WIDE_GROUP if self is Quantization.UINT4_G128 else GROUP

    @property
    def has_zero_points(self) -> bool:
        return self in (Quantization.UINT4, Quantization.UINT4_G128)


ROUNDINGS = (Quantization.INT8, Quantization.INT4)
"""What weights of any model can be rounded to."""
STORED = (Quantization.MXFP4, Quantization.NF4, Quantization.UINT4, Quantization.UINT4_G128)
"""What weights stay in that checkpoints have so."""

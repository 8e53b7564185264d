"""Quantized formats of linears' weights."""

from enum import StrEnum

GROUP = 32
"""Consecutive weights of an output that share a scale in four-bit formats."""
WIDE_GROUP = 128
"""The same for formats with wide groups."""
NF4_BLOCK = 64
"""Consecutive weights of an output whose largest magnitude determines NF4's scale."""
_INT8_SCALE_BYTES = 4
_GROUP_SCALE_BYTES = 2
_ZERO_POINT_BYTES = 1


class Quantization(StrEnum):
    INT8 = "int8"
    """Multiples of 1/127 of the largest weight of their output: a byte each."""
    INT4 = "int4"
    """-8 to 7 times a scale of five binary digits, chosen for each 32 weights of an output by the least sum of squared
    rounding errors: four bits each, and two bytes per scale. All are exact in bfloat16."""
    MXFP4 = "mxfp4"
    """Plus or minus 0, 1, 2, 3, 4, 6, 8 or 12 times a power of two for each 32 weights of an output: four bits each,
    and two bytes per scale. Used for gpt-oss's experts and compressed-tensors' linears (OCP's Microscaling Formats)."""
    NF4 = "nf4"
    """-2048, -1426, …, 1481 or 2048 times a scale: 1/2048 of the largest of each `NF4_BLOCK` weights of an output, in
    bfloat16. Four bits each, and two bytes for each 32. The multiples are the integers nearest to 2048 times
    bitsandbytes' 16 NF4 levels, at most 0.024 % of the largest weight away."""
    UINT4 = "uint4"
    """(0 to 15, minus a zero point) times a scale, both for each 32 weights of an output, or for more of them: four
    bits each, two bytes per scale, which has bfloat16's precision, and one per zero point. Used by GPTQ, AWQ and
    compressed-tensors."""
    UINT4_G128 = "uint4_g128"
    """The same, with scales and zero points for each 128 weights, or for more of them."""

    def row_bytes(self, depth: int) -> int:
        """Bytes of the weights of one output, without padding."""
        if self is Quantization.INT8:
            return depth + _INT8_SCALE_BYTES
        size, zero_point_bytes = self.group_size(depth), _ZERO_POINT_BYTES if self.has_zero_points else 0
        return -(-depth // size) * (size // 2 + _GROUP_SCALE_BYTES + zero_point_bytes)

    def group_size(self, depth: int) -> int:
        """Weights of an output that share a scale."""
        if self is Quantization.INT8:
            return depth
        return WIDE_GROUP if self is Quantization.UINT4_G128 else GROUP

    @property
    def has_zero_points(self) -> bool:
        return self in (Quantization.UINT4, Quantization.UINT4_G128)


ROUNDINGS = (Quantization.INT8, Quantization.INT4)
"""Formats to which the weights of any model can be rounded."""
STORED = (Quantization.MXFP4, Quantization.NF4, Quantization.UINT4, Quantization.UINT4_G128)
"""Formats of quantized checkpoints whose weights stay quantized."""

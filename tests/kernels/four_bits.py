"""Four-bit weights with all codes and scales of very different sizes, and their values."""

from dataclasses import replace

import torch
from loraserve_kernels.four_bit_weight import FourBitWeight
from loraserve_kernels.quantization import Quantization
from torch import Tensor

MULTIPLES = {
    Quantization.MXFP4: [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
    Quantization.NF4: [
        *(-2048, -1426, -1075, -809, -583, -378, -186, 0),
        *(163, 330, 504, 692, 903, 1152, 1481, 2048),
    ],
    Quantization.UINT4: [*range(16)],
    Quantization.UINT4_G128: [*range(16)],
}


def make_four_bits(form: Quantization, shape: tuple[int, int], size: float = 1) -> FourBitWeight:
    """Rows of very different sizes, all times `size`; one is all zeros. shape: [N, K], K in whole groups."""
    generator = torch.Generator().manual_seed(0)
    num_groups = shape[1] // form.group_size(shape[1])
    codes = torch.randint(0, 256, (shape[0], shape[1] // 2), generator=generator).to(torch.uint8)
    sizes = torch.exp2(torch.randint(-20, 20, (shape[0], 1), generator=generator)) * size
    scales = ((torch.rand(shape[0], num_groups, generator=generator) + 0.5) * sizes).bfloat16()
    if form is Quantization.MXFP4:
        scales = scales.float().log2().round().exp2().bfloat16()
    scales[shape[0] // 2] = 0
    zeros = torch.randint(0, 17, scales.shape, generator=generator).to(torch.uint8)
    return FourBitWeight(form, codes, scales, zeros if form.has_zero_points else None)


def in_other_order(weight: FourBitWeight) -> FourBitWeight:
    """The same codes for reordered inputs, so that the inputs of a group are scattered."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
    codes = torch.stack([weight.codes & 15, weight.codes >> 4], -1).flatten(1)
    first, second = codes[:, order.argsort()].unflatten(1, (-1, 2)).unbind(-1)
    return replace(weight, codes=first | second << 4, order=order.int())


def multiples_and_scales(weight: FourBitWeight) -> tuple[Tensor, Tensor]:
    """float32 [N, groups, group size] and [N, groups, 1]."""
    codes = torch.stack([weight.codes & 15, weight.codes >> 4], -1).flatten(1).unflatten(1, (-1, weight.group_size))
    multiples = torch.tensor(MULTIPLES[weight.quantization], dtype=torch.float32)[codes.int()]
    if weight.zeros is not None:
        multiples -= weight.zeros[..., None]
    return multiples, weight.scales.float()[..., None]


def one_output(form: Quantization, *groups: tuple[float, list[int]]) -> FourBitWeight:
    """A weight with one output. groups: each group's scale and first multiples; its other multiples are zero."""
    table, size = MULTIPLES[form], form.group_size(0)
    codes = [[*map(table.index, multiples), *[table.index(0)] * (size - len(multiples))] for _, multiples in groups]
    first, second = torch.tensor(codes, dtype=torch.uint8).view(1, -1, 2).unbind(-1)
    scales = torch.tensor([[scale for scale, _ in groups]]).bfloat16()
    zeros = torch.zeros(scales.shape, dtype=torch.uint8) if form.has_zero_points else None
    return FourBitWeight(form, first | second << 4, scales, zeros)

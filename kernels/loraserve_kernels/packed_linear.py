"""Linear layers on CPU with weights packed for our own C kernel, see `csrc/packed_linear.c`."""

from ctypes import addressof

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_dense
from loraserve_kernels.cpu_calls import COMPRESSED, DTYPE_CODES, PLAIN, QUANTIZED_FORMATS, PackedLinearStruct
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.four_bit_weight import FourBitWeight
from loraserve_kernels.prepacked_linear import check_linear
from loraserve_kernels.quantization import Quantization


class PackedLinear:
    """x Wᵀ + bias. weight: [N, K], bias: [N] or None; the layer owns a copy and the caller may free the weight.

    A row's result does not depend on the number of rows, bit for bit. For AMX, a bfloat16 weight is compressed without
    loss to three quarters of its bytes if N fills groups of 64 outputs (`csrc/compressed_weight.h`). quantization: the
    layer computes with the `rounded_weight` (`csrc/quantized_weight.h`). dtype: of rows, if the weight is four-bit.
    """

    def __init__(
        self,
        weight: Tensor | FourBitWeight,
        bias: Tensor | None,
        library: CpuLibrary,
        quantization: Quantization | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._c = library.functions
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, FourBitWeight):
            assert dtype is not None, "a four-bit weight has no dtype of its own"
            if bias is not None and (bias.shape, bias.dtype) != ((self.out_features,), dtype):
                raise mismatch("bias", f"{list(bias.shape)} {bias.dtype}", f"[{self.out_features}] {dtype}")
            self.dtype, self._code = dtype, DTYPE_CODES[dtype]
            self.weight, self.format = self._as_stored(weight)
            self.order = weight.order
        else:
            check_linear(weight, bias)
            if packed_bytes(weight, library) == 0:
                raise mismatch("weight", f"{list(weight.shape)} {weight.dtype}", "a weight that can be packed")
            self.dtype, self._code = weight.dtype, DTYPE_CODES[weight.dtype]
            dense = weight.detach().contiguous()
            self.weight, self.format = self._quantized(dense, quantization) if quantization else self._packed(dense)
            self.order = None
        self.bias = None if bias is None else bias.detach().contiguous()
        bias_address = None if self.bias is None else self.bias.data_ptr()
        order_address = None if self.order is None else self.order.data_ptr()
        self.struct = PackedLinearStruct(
            self.weight.data_ptr(), bias_address, self.out_features, self.in_features, self.format, order_address
        )
        """For other C functions; valid as long as this object."""
        self._address = addressof(self.struct)

    def _quantized(self, dense: Tensor, quantization: Quantization) -> tuple[Tensor, int]:
        weight_format = QUANTIZED_FORMATS[quantization]
        sizes = *dense.shape, weight_format, self._code
        weight = torch.empty(self._c.quantized_weight_bytes(*sizes), dtype=torch.uint8)
        self._c.quantize_weight(weight.data_ptr(), dense.data_ptr(), *sizes, torch.get_num_threads())
        return weight, weight_format

    def _as_stored(self, weight: FourBitWeight) -> tuple[Tensor, int]:
        weight_format = QUANTIZED_FORMATS[weight.quantization]
        packed = torch.empty(
            self._c.quantized_weight_bytes(*weight.shape, weight_format, self._code), dtype=torch.uint8
        )
        zeros = None if weight.zeros is None else weight.zeros.data_ptr()
        order = None if weight.order is None else weight.order.data_ptr()
        pointers = packed.data_ptr(), weight.codes.data_ptr(), weight.scales.data_ptr(), zeros, order
        self._c.pack_four_bits(*pointers, *weight.shape, weight_format, torch.get_num_threads())
        return packed, weight_format

    def _packed(self, dense: Tensor) -> tuple[Tensor, int]:
        """(packed weight, its format), compressed if that is worthwhile."""
        shape, num_threads = dense.shape, torch.get_num_threads()
        packed = torch.empty(self._c.packed_weight_bytes(*shape, self._code), dtype=torch.uint8)
        self._c.pack_weight(packed.data_ptr(), dense.data_ptr(), *shape, self._code, num_threads)
        size_bytes = self._c.compressed_weight_bytes(packed.data_ptr(), *shape, self._code, num_threads)
        if size_bytes == 0:
            return packed, PLAIN
        compressed = torch.empty(size_bytes, dtype=torch.uint8)
        self._c.compress_weight(compressed.data_ptr(), packed.data_ptr(), *shape, num_threads)
        return compressed, COMPRESSED

    def rows(self, indices: Tensor) -> Tensor:
        """See `Linear.rows`: int64 [...] -> [..., K]. Raises `ValueError` for an index out of range."""
        require_dense("indices", indices, torch.int64)
        rows = torch.empty((*indices.shape, self.in_features), dtype=self.dtype)
        self._c.packed_rows(
            self._address, rows.data_ptr(), indices.data_ptr(), indices.numel(), self._code, torch.get_num_threads()
        )
        return rows if self.order is None else torch.empty_like(rows).index_copy_(-1, self.order.long(), rows)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., K], rows may be strided -> [..., N], dense."""
        if x.shape[-1] != self.in_features or x.dtype != self.dtype:
            raise mismatch("x", f"{list(x.shape)} {x.dtype}", f"[..., {self.in_features}] {self.dtype}")
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
        self._c.packed_linear(
            self._address,
            y.data_ptr(),
            self.out_features,
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            self._code,
            torch.get_num_threads(),
        )
        return y


def packed_bytes(weight: Tensor, library: CpuLibrary) -> int:
    """Size of the packed weight; 0 = use another linear."""
    code = DTYPE_CODES.get(weight.dtype)
    if code is None or weight.device.type != "cpu" or weight.numel() == 0:
        return 0
    return library.functions.packed_weight_bytes(weight.shape[0], weight.shape[1], code)

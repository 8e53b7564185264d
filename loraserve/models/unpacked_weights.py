"""Reads checkpoints of GPTQ, AWQ and bitsandbytes, and packed weights of compressed-tensors, without their packages.

One function per format, following its library's definition.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from loraserve_kernels.quantization import GROUP
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loraserve.models.errors import ModelRefusedError
from loraserve.models.model_files import weight_files
from loraserve.models.packed_weights import (
    AWQ_BITS,
    AWQ_COLUMNS,
    AWQ_ORDER,
    COLUMNS,
    ROWS,
    BlocksOfLevels,
    GroupsOfCodes,
    GroupsOfFloats,
    PackedWeight,
    RowsOfInt8,
    fields,
    in_awq_order,
)

GPTQ, AWQ, BITSANDBYTES, COMPRESSED = "gptq", "awq", "bitsandbytes", "compressed-tensors"
UNPACKED = (GPTQ, AWQ, BITSANDBYTES)
"""Values of `quant_method`."""

_WORD_BITS = 32
_CODE_BITS = (2, 4, 8)
"""Widths with several codes in a word and no code split between two words."""
_ONE_GROUP = (None, -1)
"""Values of group_size that mean one group of all inputs."""
_GPTQ_V2 = "gptq_v2"
_GEMM = "gemm"
_PACKED_INTEGERS, _PACKED_MXFP4 = "pack-quantized", "mxfp4-pack-quantized"
_STATE = "weight.quant_state.bitsandbytes__"
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Refused(Exception):
    """The message says what is wrong with which tensor."""


class _Parts:
    """The tensors that make up a module's weight, named by what follows the module's name."""

    def __init__(self, module: str, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        self._module = module
        self.names = frozenset(names)
        self._read = read

    def take(self, name: str, *shape: int, given: str = "") -> Tensor:
        """shape: empty = any. given: what the shape follows from, for the error message."""
        if name not in self.names:
            raise _Refused(f"it lacks {self._module}.{name}")
        tensor = self._read(f"{self._module}.{name}")
        if shape and tensor.shape != shape:
            raise self.refused(name, f"is {list(tensor.shape)}, expected {list(shape)}{given}")
        return tensor

    def words(self, name: str, *shape: int) -> Tensor:
        tensor = self.take(name, *shape)
        if tensor.dtype != torch.int32 or tensor.dim() != 2:
            raise self.refused(name, f"is {tensor.dtype} {list(tensor.shape)}, expected torch.int32 of two dimensions")
        return tensor

    def refused(self, name: str, reason: str) -> _Refused:
        return _Refused(f"{self._module}.{name} {reason}")


class _Format(NamedTuple):
    names: re.Pattern[str]
    """Matches all tensors that may be part of a weight; its groups are the module's name and what follows it."""
    read: Callable[[_Parts, dict[str, Any]], PackedWeight]
    """Takes the parts and the `quantization_config`."""


_Opened = tuple[list[str], dict[str, list[str]], Callable[[str], Tensor]]
"""(names of tensors outside packed weights, names of the other tensors' parts by module, a tensor reader)."""


def are_unpacked(stored: dict[str, Any]) -> bool:
    """Whether this module reads the weights, not transformers. stored: a `quantization_config`."""
    method = stored.get("quant_method")
    return method in UNPACKED or (method == COMPRESSED and _packed_by(stored) is not None)


def _packed_by(stored: dict[str, Any]) -> str | None:
    """`_PACKED_INTEGERS` or `_PACKED_MXFP4`, if that is all a compressed-tensors checkpoint uses; else None."""
    schemes, sparsity = stored.get("config_groups"), stored.get("sparsity_config") or {}
    if not isinstance(schemes, dict) or len(schemes) != 1 or not isinstance(sparsity, dict):
        return None
    (scheme,) = schemes.values()
    weights: dict[str, Any] = scheme.get("weights") or {}
    is_sparse = sparsity.get("format", "dense") != "dense"
    if is_sparse or stored.get("transform_config") or weights.get("dynamic"):
        return None
    formats = {stored.get("format"), scheme.get("format")} - {None}
    kind, bits, strategy, size = (weights.get(name) for name in ("type", "num_bits", "strategy", "group_size"))
    if formats == {_PACKED_INTEGERS} and kind == "int" and bits in _CODE_BITS:
        is_grouped = strategy == "channel" if size in _ONE_GROUP else strategy == "group" and _is_size(size)
        return _PACKED_INTEGERS if is_grouped else None
    is_mxfp4 = formats == {_PACKED_MXFP4} and (kind, bits, size) == ("float", 4, GROUP)
    return _PACKED_MXFP4 if is_mxfp4 else None


def _is_size(group_size: object) -> bool:
    return isinstance(group_size, int) and group_size > 0


def unsupported_option(stored: dict[str, Any]) -> str | None:
    """An unsupported option of a `quantization_config` and what is wrong with it; None if all options are supported.

    stored: a config that `are_unpacked` accepts.
    """
    if stored["quant_method"] == COMPRESSED:
        return None  # `are_unpacked` accepts only what is supported
    method, bits, layouts = stored["quant_method"], stored.get("bits"), _layouts(stored)
    size = stored.get("group_size")
    if method in (GPTQ, AWQ) and size not in _ONE_GROUP and not _is_size(size):
        return f"group_size ({size!r}) must be a positive number of inputs, or -1 for all of them"
    shown_layouts = ", ".join(sorted(layouts))
    if method == GPTQ and bits not in _CODE_BITS:
        return f"bits ({bits!r}) is not supported (supported: {', '.join(map(str, _CODE_BITS))})"
    if method == GPTQ and layouts not in ({GPTQ}, {_GPTQ_V2}):
        return f"format ({shown_layouts}) is not supported (supported: {GPTQ}, {_GPTQ_V2})"
    if method == AWQ and bits != AWQ_BITS:
        return f"bits ({bits!r}) is not supported (supported: {AWQ_BITS})"
    if method == AWQ and layouts != {_GEMM}:
        return f"version ({shown_layouts}) is not supported (supported: {_GEMM})"
    if method == AWQ and stored.get("zero_point", True) is not True:
        return f"zero_point ({stored['zero_point']!r}) is not supported (supported: True)"
    is_8bit, is_4bit = stored.get("load_in_8bit"), stored.get("load_in_4bit")
    if method == BITSANDBYTES and bool(is_8bit) is bool(is_4bit):
        return f"load_in_8bit ({is_8bit!r}) and load_in_4bit ({is_4bit!r}) are not supported (supported: one of them)"
    return None


def _layouts(stored: dict[str, Any]) -> set[str]:
    """The packing layouts that the config states, under any of the names that libraries use."""
    names = ("checkpoint_format", "format", "version")
    stated = {str(stored[name]).lower() for name in names if stored.get(name) is not None}
    stated |= {"marlin"} if stored.get("is_marlin_format") else set()
    stated |= {"llm-awq"} if stored.get("backend") == "llm-awq" else set()
    return stated or {_GEMM if stored["quant_method"] == AWQ else GPTQ}


def read_dequantized(
    model: str,
    revision: str | None,
    stored: dict[str, Any],
    dtype: torch.dtype,
    left_out: Collection[str] = (),
) -> dict[str, Tensor]:
    """All tensors of the checkpoint, floats in `dtype`, packed weights dequantized.

    stored: its `quantization_config`, in which `unsupported_option` finds nothing. left_out: names of weights to omit.
    Raises `ModelRefusedError`.
    """
    with _reading(model, revision, _format(stored)) as (others, modules, read):
        tensors = {name: read(name) for name in others}
        tensors = {name: found.to(dtype) if found.is_floating_point() else found for name, found in tensors.items()}
        for module, parts in modules.items():
            if (name := f"{module}.weight") not in left_out:
                packed = _packed(_Parts(module, parts, read), _format(stored), stored)
                tensors[name] = (read(name) if packed is None else packed.dequantize()).to(dtype)
        return tensors


def packed_weights(model: str, revision: str | None, stored: dict[str, Any]) -> dict[str, PackedWeight]:
    """By module name in the file. stored: see `read_dequantized`. Raises `ModelRefusedError`."""
    packing = _format(stored)
    with _reading(model, revision, packing) as (_, modules, read):
        weights = {module: _packed(_Parts(module, parts, read), packing, stored) for module, parts in modules.items()}
        return {module: weight for module, weight in weights.items() if weight is not None}


def _packed(parts: _Parts, packing: _Format, stored: dict[str, Any]) -> PackedWeight | None:
    """None if the checkpoint has the weight unquantized."""
    if parts.names == {"weight"} and parts.take("weight").is_floating_point():
        return None
    return packing.read(parts, stored)


@contextmanager
def _reading(model: str, revision: str | None, packing: _Format) -> Iterator[_Opened]:
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, "pt")) for path in weight_files(model, revision)]
            places = {name: file for file in files for name in file.keys()}  # noqa: SIM118, an open file is not a mapping
            others: list[str] = []
            modules: dict[str, list[str]] = {}
            for name in places:
                if (found := packing.names.fullmatch(name)) is not None:
                    modules.setdefault(found[1], []).append(found[2])
                else:
                    others.append(name)
            yield others, modules, lambda name: places[name].get_tensor(name)
    except (_Refused, OSError, SafetensorError) as error:
        raise ModelRefusedError(f"{model} cannot be read: {error}") from error


def _format(stored: dict[str, Any]) -> _Format:
    if stored["quant_method"] == BITSANDBYTES:
        return _BITSANDBYTES_8 if stored.get("load_in_8bit") else _BITSANDBYTES_4
    if stored["quant_method"] == COMPRESSED:
        return _INTEGERS if _packed_by(stored) == _PACKED_INTEGERS else _MXFP4
    return _GPTQ if stored["quant_method"] == GPTQ else _AWQ


def _read_gptq(parts: _Parts, stored: dict[str, Any]) -> GroupsOfCodes:
    bits: int = stored["bits"]
    per_word = _WORD_BITS // bits
    packed = parts.words("qweight")
    num_in, num_out = packed.shape[0] * per_word, packed.shape[1]
    group_size = _group_size(stored, num_in)
    num_groups = -(-num_in // group_size)
    scales = parts.take("scales", num_groups, num_out, given=_stated(bits, group_size))
    zeros = fields(parts.words("qzeros", num_groups, num_out // per_word), bits).flatten(1)
    if _layouts(stored) == {GPTQ}:
        # Stored minus one, without a borrow: some readers take a zero point of 0 for 0, others for 2 ** bits.
        if bool((zeros == 2**bits - 1).any()):
            raise parts.refused(
                "qzeros", "has zero points of 0, which are ambiguous in this format: save it as gptq_v2"
            )
        zeros = zeros + 1
    group_of_row = None
    if stored.get("desc_act") or "g_idx" in parts.names:
        group_of_row = _groups_of_rows(parts, "g_idx", num_in, num_groups)
    return GroupsOfCodes((num_out, num_in), bits, packed, COLUMNS, zeros, scales, group_size, group_of_row)


def _read_awq(parts: _Parts, stored: dict[str, Any]) -> GroupsOfCodes:
    packed = parts.words("qweight")
    num_in, num_out = packed.shape[0], packed.shape[1] * len(AWQ_ORDER)
    group_size = _group_size(stored, num_in)
    num_groups = -(-num_in // group_size)
    scales = parts.take("scales", num_groups, num_out, given=_stated(AWQ_BITS, group_size))
    zeros = in_awq_order(parts.words("qzeros", num_groups, packed.shape[1]))
    return GroupsOfCodes((num_out, num_in), AWQ_BITS, packed, AWQ_COLUMNS, zeros, scales, group_size, None)


def _read_integers(parts: _Parts, stored: dict[str, Any]) -> GroupsOfCodes:
    (scheme,) = stored["config_groups"].values()
    weights = scheme["weights"]
    bits: int = weights["num_bits"]
    per_word = _WORD_BITS // bits
    num_out, num_in = parts.take("weight_shape", 2).tolist()
    packed = parts.words("weight_packed", num_out, -(-num_in // per_word))
    group_size = _group_size(weights, num_in)
    num_groups = -(-num_in // group_size)
    scales = parts.take("weight_scale", num_out, num_groups, given=_stated(bits, group_size)).T
    if weights.get("symmetric", True):
        zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8)
    else:
        words = parts.words("weight_zero_point", -(-num_out // per_word), num_groups)
        zeros = fields(words.T, bits).flatten(1)[:, :num_out]
    group_of_row = None
    if weights.get("actorder") == "group" or "weight_g_idx" in parts.names:
        group_of_row = _groups_of_rows(parts, "weight_g_idx", num_in, num_groups)
    return GroupsOfCodes((num_out, num_in), bits, packed, ROWS, zeros, scales, group_size, group_of_row)


def _read_mxfp4(parts: _Parts, _: dict[str, Any]) -> GroupsOfFloats:
    packed = parts.take("weight_packed")
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] % (GROUP // 2) != 0:
        expected = f"torch.uint8 [out_features, in_features / 2] in groups of {GROUP}"
        raise parts.refused("weight_packed", f"is {packed.dtype} {list(packed.shape)}, expected {expected}")
    exponents = parts.take("weight_scale", packed.shape[0], packed.shape[1] // (GROUP // 2))
    if exponents.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise parts.refused("weight_scale", f"is {exponents.dtype}, expected torch.uint8 or torch.float8_e8m0fnu")
    return GroupsOfFloats(packed, exponents.view(torch.uint8))


def _groups_of_rows(parts: _Parts, name: str, num_in: int, num_groups: int) -> Tensor:
    group_of_row = parts.take(name, num_in).long()
    if not 0 <= int(group_of_row.min()) <= int(group_of_row.max()) < num_groups:
        raise parts.refused(name, f"refers to groups outside the {num_groups} that exist")
    return group_of_row


def _read_4bit(parts: _Parts, _: dict[str, Any]) -> BlocksOfLevels:
    state_name = next((name for name in parts.names if name.startswith(_STATE)), f"{_STATE}nf4")
    try:
        state = json.loads(parts.take(state_name).numpy().tobytes())
        (num_rows, depth), block_size, dtype = state["shape"], int(state["blocksize"]), _FLOATS[state["dtype"]]
        nested_size, offset = int(state.get("nested_blocksize", 0)), float(state.get("nested_offset", 0.0))
        num_elements = num_rows * depth
        num_blocks = -(-num_elements // block_size)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise parts.refused(state_name, f"cannot be parsed: {error!r}") from None
    codes = parts.take("weight").flatten().view(torch.uint8)  # of any `bnb_4bit_quant_storage`
    if len(codes) != -(-num_elements // 2):
        raise parts.refused(
            "weight", f"has {len(codes)} bytes, expected {-(-num_elements // 2)} for {[num_rows, depth]}"
        )
    of_blocks, nested = parts.take("weight.absmax", num_blocks), None
    if not of_blocks.is_floating_point():
        if nested_size < 1:
            raise parts.refused(state_name, f"has nested_blocksize {nested_size}, expected at least 1")
        largest = parts.take("weight.nested_absmax", -(-num_blocks // nested_size))
        nested = parts.take("weight.nested_quant_map", 256), largest, nested_size, offset
    levels = parts.take("weight.quant_map", 16).float()
    return BlocksOfLevels((num_rows, depth), dtype, block_size, codes, levels, of_blocks, nested)


def _read_8bit(parts: _Parts, _: dict[str, Any]) -> RowsOfInt8:
    packed = parts.take("weight")
    if packed.dtype != torch.int8 or packed.dim() != 2:
        raise parts.refused("weight", f"is {packed.dtype} {list(packed.shape)}, expected torch.int8 of two dimensions")
    if "weight_format" in parts.names and (found := int(parts.take("weight_format"))) != 0:
        raise parts.refused("weight_format", f"is {found}, expected 0: the row format")
    return RowsOfInt8(packed, parts.take("SCB", len(packed)))


def _group_size(stored: dict[str, Any], num_in: int) -> int:
    """Inputs per group."""
    size = stored.get("group_size")
    return num_in if size in _ONE_GROUP else size


def _stated(bits: int, group_size: int) -> str:
    return f" for {bits} bits and a group_size of {group_size}, as in config.json"


_GPTQ = _Format(re.compile(r"(.+)\.(qweight|qzeros|scales|g_idx)"), _read_gptq)
_AWQ = _Format(re.compile(r"(.+)\.(qweight|qzeros|scales)"), _read_awq)
_INTEGERS = _Format(re.compile(r"(.+)\.(weight_(?:packed|scale|shape|zero_point|g_idx))"), _read_integers)
_MXFP4 = _Format(re.compile(r"(.+)\.(weight_(?:packed|scale))"), _read_mxfp4)
_BITSANDBYTES_4 = _Format(
    re.compile(r"(.+)\.(weight(?:\.(?:nested_)?(?:absmax|quant_map)|\.quant_state\.bitsandbytes__\w+)?)"), _read_4bit
)
_BITSANDBYTES_8 = _Format(re.compile(r"(.+)\.(weight|weight_format|SCB)"), _read_8bit)

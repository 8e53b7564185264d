"""Weights of GPTQ, AWQ and bitsandbytes checkpoints, made whole; transformers needs packages of kernels to read these.

Each format in one function, as the library that writes it defines it: AutoGPTQ and GPTQModel, AutoAWQ, bitsandbytes.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import embedding

from loraserve.models.errors import ModelRefusedError
from loraserve.models.model_files import weight_files

GPTQ, AWQ, BITSANDBYTES = "gptq", "awq", "bitsandbytes"
UNPACKED = (GPTQ, AWQ, BITSANDBYTES)
"""Values of `quant_method`."""

_WORD_BITS = 32
_GPTQ_BITS = (2, 4, 8)
_GPTQ_V2 = "gptq_v2"
_AWQ_BITS, _GEMM = 4, "gemm"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of eight that each four bits of a word are, from the lowest on."""
_LARGEST_INT8 = 127
_STATE = "weight.quant_state.bitsandbytes__"
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Refused(Exception):
    """The message says what is wrong with which tensor."""


class _Parts:
    """The tensors that a module's weight is made of, by what follows its name."""

    def __init__(self, module: str, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        self._module = module
        self.names = frozenset(names)
        self._read = read

    def take(self, name: str, *shape: int) -> Tensor:
        """shape: None given = any."""
        if name not in self.names:
            raise _Refused(f"it lacks {self._module}.{name}")
        tensor = self._read(f"{self._module}.{name}")
        if shape and tensor.shape != shape:
            raise self.refused(name, f"is {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def words(self, name: str, *shape: int) -> Tensor:
        tensor = self.take(name, *shape)
        if tensor.dtype != torch.int32 or tensor.dim() != 2:
            raise self.refused(name, f"is {tensor.dtype} {list(tensor.shape)}, expected torch.int32 of two dimensions")
        return tensor

    def refused(self, name: str, reason: str) -> _Refused:
        return _Refused(f"{self._module}.{name} {reason}")


@dataclass(frozen=True, slots=True)
class FourBits:
    """A weight of bitsandbytes: levels times the largest of each block, as they were, or in eight bits themselves."""

    shape: tuple[int, int]
    dtype: torch.dtype
    """To which products are rounded."""
    block_size: int
    """Elements, row after row."""
    codes: Tensor
    """uint8 [elements / 2]: places in levels, the first in the upper bits. May be mapped from the file."""
    levels: Tensor
    """float32 [16]."""
    of_blocks: Tensor
    """[blocks]: the largest of each in floats, or places in the first of `nested`, uint8."""
    nested: tuple[Tensor, Tensor, int, float] | None
    """What places stand for [256], times the largest of each group of blocks [groups]; blocks in a group; and what is
    added. None = they are no places."""

    def largest(self) -> Tensor:
        """float32 [blocks]."""
        if self.nested is None:
            return self.of_blocks.float()
        multiples, largest, size, offset = self.nested
        return (
            multiples[self.of_blocks.long()] * largest.repeat_interleave(size)[: len(self.of_blocks)] + offset
        ).float()

    def whole(self) -> Tensor:
        of_byte = torch.stack([self.levels.repeat_interleave(16), self.levels.repeat(16)], dim=1)
        whole, largest = embedding(self.codes.int(), of_byte).flatten(), self.largest()
        num_elements = self.shape[0] * self.shape[1]
        if num_elements % self.block_size == 0:
            whole.view(-1, self.block_size).mul_(largest[:, None])
        else:
            whole = whole[:num_elements] * largest.repeat_interleave(self.block_size)[:num_elements]
        return whole.to(self.dtype).view(self.shape)


class _Format(NamedTuple):
    names: re.Pattern[str]
    """Of all tensors that a weight may be made of: of the module, and what follows it."""
    unpack: Callable[[_Parts, dict[str, Any]], Tensor]
    """With the `quantization_config`; gives [out_features, in_features]."""


_Opened = tuple[list[str], dict[str, list[str]], Callable[[str], Tensor]]
"""Names of tensors that are no parts of packed weights, the others by their module, and how one is read."""


def what_is_not_read(stored: dict[str, Any]) -> str | None:
    """What is wrong with the option of a `quantization_config` that is not followed; None where all are.

    quant_method: of `UNPACKED`.
    """
    method, bits, layouts = stored["quant_method"], stored.get("bits"), _layouts(stored)
    shown_layouts = ", ".join(sorted(layouts))
    if method == GPTQ and bits not in _GPTQ_BITS:
        return f"bits ({bits!r}) is not supported, {', '.join(map(str, _GPTQ_BITS))} are"
    if method == GPTQ and layouts not in ({GPTQ}, {_GPTQ_V2}):
        return f"format ({shown_layouts}) is not supported, {GPTQ} and {_GPTQ_V2} are"
    if method == AWQ and bits != _AWQ_BITS:
        return f"bits ({bits!r}) is not supported, {_AWQ_BITS} is"
    if method == AWQ and layouts != {_GEMM}:
        return f"version ({shown_layouts}) is not supported, {_GEMM} is"
    if method == AWQ and stored.get("zero_point", True) is not True:
        return f"zero_point ({stored['zero_point']!r}) is not supported, True is"
    is_8bit, is_4bit = stored.get("load_in_8bit"), stored.get("load_in_4bit")
    if method == BITSANDBYTES and bool(is_8bit) is bool(is_4bit):
        return f"load_in_8bit ({is_8bit!r}) and load_in_4bit ({is_4bit!r}) are not supported, one of them is"
    return None


def _layouts(stored: dict[str, Any]) -> set[str]:
    """By all the names that libraries have for it."""
    names = ("checkpoint_format", "format", "version")
    stated = {str(stored[name]).lower() for name in names if stored.get(name) is not None}
    stated |= {"marlin"} if stored.get("is_marlin_format") else set()
    stated |= {"llm-awq"} if stored.get("backend") == "llm-awq" else set()
    return stated or {_GEMM if stored["quant_method"] == AWQ else GPTQ}


def read_whole(
    model: str,
    revision: str | None,
    stored: dict[str, Any],
    dtype: torch.dtype,
    given: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """All tensors of the checkpoint, in `dtype`, those of packed weights as the weights that they stand for.

    stored: its `quantization_config`, of which `what_is_not_read` finds nothing. given: weights that are not read.
    Raises `ModelRefusedError`.
    """
    with _reading(model, revision, _format(stored)) as (others, modules, read):
        tensors = {name: read(name) for name in others}
        tensors = {name: found.to(dtype) if found.is_floating_point() else found for name, found in tensors.items()}
        for module, parts in modules.items():
            name = f"{module}.weight"
            if name in given:
                tensors[name] = given[name]
                continue
            weight = None if parts != ["weight"] else read(name)
            if weight is None or not weight.is_floating_point():
                weight = _format(stored).unpack(_Parts(module, parts, read), stored)
            tensors[name] = weight.to(dtype)
        return tensors


def four_bit_weights(model: str, revision: str | None, stored: dict[str, Any]) -> dict[str, FourBits]:
    """Those that a checkpoint of bitsandbytes has so, by the names of their modules. stored: see `read_whole`.

    Raises `ModelRefusedError`.
    """
    packing = _format(stored)
    if packing is not _BITSANDBYTES_4:
        return {}
    with _reading(model, revision, packing) as (_, modules, read):
        packed = {module: parts for module, parts in modules.items() if parts != ["weight"]}
        return {module: _four_bits(_Parts(module, parts, read)) for module, parts in packed.items()}


@contextmanager
def _reading(model: str, revision: str | None, packing: _Format) -> Iterator[_Opened]:
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, "pt")) for path in weight_files(model, revision)]
            places = {name: file for file in files for name in file.keys()}  # noqa: SIM118, a file is no mapping
            others: list[str] = []
            modules: dict[str, list[str]] = {}
            for name in places:
                if (found := packing.names.fullmatch(name)) is not None:
                    modules.setdefault(found[1], []).append(found[2])
                else:
                    others.append(name)
            yield others, modules, lambda name: places[name].get_tensor(name)
    except (_Refused, OSError, SafetensorError) as error:
        raise ModelRefusedError(f"{model} cannot be made whole: {error}") from error


def _format(stored: dict[str, Any]) -> _Format:
    if stored["quant_method"] == BITSANDBYTES:
        return _BITSANDBYTES_8 if stored.get("load_in_8bit") else _BITSANDBYTES_4
    return _GPTQ if stored["quant_method"] == GPTQ else _AWQ


def _unpack_gptq(parts: _Parts, stored: dict[str, Any]) -> Tensor:
    """qweight: int32 [in_features / n, out_features], n of a column in a word, the first in its lowest bits."""
    bits: int = stored["bits"]
    per_word = _WORD_BITS // bits
    packed = parts.words("qweight")
    num_in, num_out = packed.shape[0] * per_word, packed.shape[1]
    group_size = _group_size(stored, num_in)
    num_groups = -(-num_in // group_size)
    scales = parts.take("scales", num_groups, num_out)
    zeros = _fields(parts.words("qzeros", num_groups, num_out // per_word), bits).flatten(1)
    if _layouts(stored) == {GPTQ}:
        # Stored less one, without what that borrows: of a zero point of 0 readers make 0 or 2 ** bits.
        if bool((zeros == 2**bits - 1).any()):
            raise parts.refused("qzeros", "has zero points of 0, which this format leaves open: save it as gptq_v2")
        zeros = zeros + 1
    group_of_row = None
    if stored.get("desc_act") or "g_idx" in parts.names:
        group_of_row = parts.take("g_idx", num_in).long()
        if not 0 <= int(group_of_row.min()) <= int(group_of_row.max()) < num_groups:
            raise parts.refused("g_idx", f"names groups that are none of {num_groups}")
    return _scaled(_fields(packed, bits).movedim(1, 0).flatten(1), zeros, scales, group_size, group_of_row)


def _unpack_awq(parts: _Parts, stored: dict[str, Any]) -> Tensor:
    """qweight: int32 [in_features, out_features / 8], eight of a row in a word."""
    packed = parts.words("qweight")
    num_in, num_out = packed.shape[0], packed.shape[1] * len(_AWQ_ORDER)
    group_size = _group_size(stored, num_in)
    num_groups = -(-num_in // group_size)
    scales = parts.take("scales", num_groups, num_out)
    zeros = _in_awq_order(parts.words("qzeros", num_groups, packed.shape[1]))
    return _scaled(_in_awq_order(packed).T.contiguous(), zeros, scales, group_size, None)


def _scaled(codes: Tensor, zeros: Tensor, scales: Tensor, group_size: int, group_of_row: Tensor | None) -> Tensor:
    """codes: uint8 [N, K]; zeros, scales: [G, N], G groups of K. group_of_row: [K], None = they follow each other."""
    num_in = codes.shape[1]
    zeros, scales = zeros.T.float(), scales.T.float()
    if group_of_row is None and num_in % group_size == 0:
        # 4,096 × 4,096 codes in 30 ms; with a scale and a zero point for each in 114 (two Zen 4 cores).
        grouped = codes.unflatten(1, (-1, group_size)).float()
        return grouped.sub_(zeros[..., None]).mul_(scales[..., None]).flatten(1)
    if group_of_row is None:
        group_of_row = torch.arange(num_in) // group_size
    return codes.float().sub_(zeros[:, group_of_row]).mul_(scales[:, group_of_row])


def _unpack_4bit(parts: _Parts, _: dict[str, Any]) -> Tensor:
    return _four_bits(parts).whole()


def _four_bits(parts: _Parts) -> FourBits:
    state_name = next((name for name in parts.names if name.startswith(_STATE)), f"{_STATE}nf4")
    try:
        state = json.loads(parts.take(state_name).numpy().tobytes())
        (num_rows, depth), block_size, dtype = state["shape"], int(state["blocksize"]), _FLOATS[state["dtype"]]
        nested_size, offset = int(state.get("nested_blocksize", 0)), float(state.get("nested_offset", 0.0))
        num_elements = num_rows * depth
        num_blocks = -(-num_elements // block_size)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise parts.refused(state_name, f"is not understood: {error!r}") from None
    codes = parts.take("weight").flatten().view(torch.uint8)  # of any `bnb_4bit_quant_storage`
    if len(codes) != -(-num_elements // 2):
        raise parts.refused(
            "weight", f"has {len(codes)} bytes, expected {-(-num_elements // 2)} for {[num_rows, depth]}"
        )
    of_blocks, nested = parts.take("weight.absmax", num_blocks), None
    if not of_blocks.is_floating_point():
        if nested_size < 1:
            raise parts.refused(state_name, f"has nested_blocksize {nested_size}")
        largest = parts.take("weight.nested_absmax", -(-num_blocks // nested_size))
        nested = parts.take("weight.nested_quant_map", 256), largest, nested_size, offset
    levels = parts.take("weight.quant_map", 16).float()
    return FourBits((num_rows, depth), dtype, block_size, codes, levels, of_blocks, nested)


def _unpack_8bit(parts: _Parts, _: dict[str, Any]) -> Tensor:
    """weight: int8 [out_features, in_features]; SCB: the largest of each row."""
    packed = parts.take("weight")
    if packed.dtype != torch.int8:
        raise parts.refused("weight", f"is {packed.dtype}, expected torch.int8")
    if "weight_format" in parts.names and int(parts.take("weight_format")) != 0:
        raise parts.refused("weight_format", "is not that of rows")
    return packed.float() * (parts.take("SCB", len(packed)).float() / _LARGEST_INT8)[:, None]


def _group_size(stored: dict[str, Any], num_in: int) -> int:
    size = stored.get("group_size", -1)
    return size if isinstance(size, int) and size > 0 else num_in


def _fields(words: Tensor, bits: int) -> Tensor:
    """int32 [m, n] -> uint8 [m, n, 32 / bits], from the lowest bits on."""
    # NOTE: bytes of little-endian machines, as are all that torch and safetensors run on.
    in_bytes = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    fields = [(in_bytes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=-1).flatten(-2)


def _in_awq_order(words: Tensor) -> Tensor:
    """int32 [m, n] -> uint8 [m, 8 n]."""
    fields = _fields(words, _AWQ_BITS)
    return fields[..., torch.tensor(_AWQ_ORDER).argsort()].flatten(1)


_GPTQ = _Format(re.compile(r"(.+)\.(qweight|qzeros|scales|g_idx)"), _unpack_gptq)
_AWQ = _Format(re.compile(r"(.+)\.(qweight|qzeros|scales)"), _unpack_awq)
_BITSANDBYTES_4 = _Format(
    re.compile(r"(.+)\.(weight(?:\.(?:nested_)?(?:absmax|quant_map)|\.quant_state\.bitsandbytes__\w+)?)"), _unpack_4bit
)
_BITSANDBYTES_8 = _Format(re.compile(r"(.+)\.(weight|weight_format|SCB)"), _unpack_8bit)

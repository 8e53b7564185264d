"""Makes Triton's interpreter faster, with the same results."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

import numpy as np
import pytest

FRAME_WORDS = 4200
"""More than half of the stack chunk that CPython 3.11 then allocates for this frame (64 KiB); the rest is left for its
callees."""


def speed_up_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_calls(monkeypatch)
    patch_types(monkeypatch)
    patch_operands(monkeypatch)
    patch_handles(monkeypatch)
    patch_frames(monkeypatch)


def patch_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter patches `triton.language` at each launch, and again whenever a kernel calls a function. Each
    operation goes through two functions that only pass their arguments on. Reuses the patches, and calls it directly.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    @cache
    def languages(function: Callable) -> list[ModuleType]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def call(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        if any(tl.core.is_builtin(language.load) for language in languages(self.fn)):
            patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    passes_on, semantic = tl.core.program_id.__code__, interpreter.interpreter_semantic

    def patch_attr(obj: object, name: str, member: Callable, _: object, scope: interpreter._LangPatchScope) -> None:
        operation = member.__wrapped__ if member.__code__ is passes_on else member

        def operate(*args: object, **kwargs: object) -> object:
            kwargs["_semantic"] = semantic
            return operation(*args, **kwargs)

        scope.set_attr(obj, name, operate)

    patch_lang_anew = interpreter._patch_lang
    patches: dict[tuple[int, ...], dict[tuple[int, str], tuple[object, str, object]]] = {}

    def patch_lang(function: Callable) -> interpreter._LangPatchScope:
        key = tuple(map(id, languages(function)))
        if key not in patches:
            scope = patch_lang_anew(function)
            patches[key] = {(id(obj), name): (obj, name, getattr(obj, name)) for obj, name, _ in scope._changes}
            return scope
        scope = interpreter._LangPatchScope()
        for patch in patches[key].values():
            scope.set_attr(*patch)
        return scope

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(interpreter, "_patch_attr", patch_attr)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_lang)


def patch_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each value, the interpreter makes a table of dtypes and two tuples of constants for its shape. Caches all."""
    import triton.language as tl
    from triton.runtime import interpreter

    np_dtype_of = interpreter._get_np_dtype
    np_dtypes: dict[str, np.dtype] = {}

    def np_dtype(dtype: tl.dtype) -> np.dtype:
        name = str(dtype.scalar)
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype_of(dtype.scalar)
        return np_dtypes[name]

    make_block_type, blocks = tl.core.block_type.__init__, {}

    def init_block_type(self: tl.core.block_type, element_ty: tl.dtype, shape: Sequence) -> None:
        key = str(element_ty), *[getattr(size, "value", size) for size in shape]
        if key not in blocks:
            make_block_type(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    make_tensor, sizes = tl.core.tensor.__init__, {}

    def init_tensor(self: tl.core.tensor, handle: object, type: tl.dtype) -> None:
        name = type.name if type.is_block() else ""
        if name not in sizes:
            make_tensor(self, handle, type)
            sizes[name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes[name]

    unwrap_anew, plain = tl.core._unwrap_if_constexpr, {tl.tensor, int, str, float, bool, tl.dtype, tl.block_type}

    def unwrap(value: object) -> object:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is tl.constexpr else unwrap_anew(value)

    def is_equal(self: tl.dtype, other: object) -> bool:
        other = unwrap(other)
        return isinstance(other, tl.dtype) and self.name == other.name

    monkeypatch.setattr(tl.core, "_unwrap_if_constexpr", unwrap)
    monkeypatch.setattr(tl.dtype, "__eq__", is_equal)
    monkeypatch.setattr(interpreter, "_get_np_dtype", np_dtype)
    monkeypatch.setattr(tl.core.block_type, "__init__", init_block_type)
    monkeypatch.setattr(tl.core.tensor, "__init__", init_tensor)


def patch_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each operation, the interpreter works out again which type and shape to convert its operands to (mostly those
    they have), and makes a value of each Python integer. It also checks for overflow of sums with nine more operations,
    and then asserts nothing, because its option `debug` is off. Caches the former and turns off the latter."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import interpreter_builder

    broadcast_anew = TritonSemantic.broadcast_impl_value
    broadcasts: dict[tuple[str, str], list[tl.dtype | None]] = {}

    def broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        key = lhs.type.name, rhs.type.name
        if key not in broadcasts:
            results = broadcast_anew(self, lhs, rhs)
            pairs = zip((lhs, rhs), results, strict=True)
            broadcasts[key] = [None if result is value else result.type for value, result in pairs]
            return results
        lhs_type, rhs_type = broadcasts[key]
        return expand(self, lhs, lhs_type), expand(self, rhs, rhs_type)

    def expand(self: TritonSemantic, value: tl.tensor, type: tl.dtype | None) -> tl.tensor:
        if type is None:
            return value
        if value.type.is_block():
            return self.tensor(self.builder.create_broadcast(value.handle, type.shape.values), type)
        return self.tensor(self.builder.create_splat(type, value.handle), type)

    convert_anew = TritonSemantic.binary_op_type_checking_impl
    never_cast: set[tuple] = set()
    constants: dict[tuple, tl.tensor] = {}

    def convert(self: TritonSemantic, lhs: object, rhs: object, *flags: bool) -> tuple[tl.tensor, tl.tensor]:
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
            key = lhs.type.name, rhs.type.name, flags
            if key in never_cast:
                return broadcast(self, lhs, rhs)
            results = convert_anew(self, lhs, rhs, *flags)
            if (results[0].dtype, results[1].dtype) == (lhs.dtype, rhs.dtype):
                never_cast.add(key)
            return results
        if isinstance(lhs, tl.tensor) and type(rhs) is int:
            key = lhs.type.name, rhs, flags
            if key in constants:
                return lhs, constants[key]
            results = convert_anew(self, lhs, rhs, *flags)
            if results[0] is lhs:
                constants[key] = results[1]
            return results
        return convert_anew(self, lhs, rhs, *flags)

    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast)
    monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", convert)
    options = interpreter_builder.options
    monkeypatch.setattr(interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=options.debug))


def patch_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each value, the interpreter works out again how large an element of its type may be. Caches that."""
    import triton.language as tl
    from triton.runtime import interpreter

    sizes: dict[str, float] = {}

    def num_bytes(dtype: tl.dtype) -> float:
        if dtype.name not in sizes:
            sizes[dtype.name] = float("inf") if dtype.is_ptr() else max(dtype.primitive_bitwidth // 8, 1)
        return sizes[dtype.name]

    def init_handle(self: interpreter.TensorHandle, data: np.ndarray, dtype: tl.dtype) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}
        if data.itemsize > num_bytes(dtype):
            self.__post_init__()

    compute_anew = interpreter.InterpreterBuilder.binary_op
    bitwise = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}

    def binary_op(
        self: interpreter.InterpreterBuilder,
        lhs: interpreter.TensorHandle,
        rhs: interpreter.TensorHandle,
        op: Callable,
    ) -> interpreter.TensorHandle:
        if lhs.data.dtype.kind == "b" and op not in bitwise:
            return compute_anew(self, lhs, rhs, op)
        result, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
        if result.itemsize > num_bytes(dtype):
            result = result.astype(interpreter._get_np_dtype(dtype))
        return interpreter.TensorHandle(result, dtype)

    monkeypatch.setattr(interpreter.TensorHandle, "__init__", init_handle)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "binary_op", binary_op)


def patch_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a call in the interpreter is the first to need another chunk of Python's stack, each such call maps and unmaps
    the chunk: depending on the depth of its stack, a test took 16 or 70 seconds. Starts a chunk before those calls."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def launch_in_wide_frame(self: interpreter.GridExecutor, *args: object, **kwargs: object) -> None:
        launch(self, *args, **kwargs)

    code = launch_in_wide_frame.__code__
    launch_in_wide_frame.__code__ = code.replace(co_stacksize=FRAME_WORDS)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_in_wide_frame)

"""Triton's interpreter, faster and with the same results."""

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

import numpy as np
import pytest

FRAME_WORDS = 4200
"""More than half of the piece of stack that CPython 3.11 then takes for this frame (64 KiB); the rest is left for what
it calls."""


def speed_up_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does again and again:

    It makes `triton.language` its own at each call of a function by a kernel, and a table of dtypes for each value: a
    fifth to a third of its CPU time; and for each value two tuples of constants that say its shape, a sixth of what is
    left. And where one of its calls is the first to need another piece of Python's stack, each such call maps and
    unmaps the piece: how deep its stack was decided whether a test took 16 or 70 seconds.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    @cache
    def languages(function: Callable) -> list[ModuleType]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    patch_lang = interpreter._patch_lang

    def call(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        if any(tl.core.is_builtin(language.load) for language in languages(self.fn)):
            patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

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

    launch = interpreter.GridExecutor.__call__

    def launch_in_wide_frame(self: interpreter.GridExecutor, *args: object, **kwargs: object) -> None:
        launch(self, *args, **kwargs)

    code = launch_in_wide_frame.__code__
    launch_in_wide_frame.__code__ = code.replace(co_stacksize=FRAME_WORDS)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(interpreter, "_get_np_dtype", np_dtype)
    monkeypatch.setattr(tl.core.block_type, "__init__", init_block_type)
    monkeypatch.setattr(tl.core.tensor, "__init__", init_tensor)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_in_wide_frame)

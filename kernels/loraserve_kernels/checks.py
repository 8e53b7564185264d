"""Checks before a launch. They run hundreds of times per step, so messages are built only after a check has failed."""

from torch import Tensor


def mismatch(name: str, value: object, expected: object) -> ValueError:
    """The error for a value that is not what an op expects."""
    return ValueError(f"{name} is {value}, expected {expected}")


def require_rows(name: str, tensor: Tensor, num_columns: int) -> None:
    """Require [rows, num_columns] with a dense last dimension; rows may be strided."""
    if tensor.dim() != 2 or tensor.shape[1] != num_columns:
        raise mismatch(name, list(tensor.shape), f"[rows, {num_columns}]")
    require_dense_last(name, tensor)


def require_dense_last(name: str, tensor: Tensor) -> None:
    """Require that the elements of the last dimension are adjacent."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise mismatch(f"stride of {name}'s last dimension", tensor.stride(-1), 1)


def require_like(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Require the dtype and the device of another tensor."""
    if tensor.dtype != like.dtype:
        raise mismatch(f"{name}.dtype", tensor.dtype, f"{like.dtype}, as {like_name}")
    if tensor.device != like.device:
        raise mismatch(f"{name}.device", tensor.device, f"{like.device}, as {like_name}")


def require_dense(name: str, tensor: Tensor, dtype: object) -> None:
    """Require a dense tensor of the given dtype."""
    if tensor.dtype != dtype:
        raise mismatch(f"{name}.dtype", tensor.dtype, dtype)
    if not tensor.is_contiguous():
        raise mismatch(name, "strided", "dense")


def require_cpu(name: str, tensor: Tensor) -> None:
    """The C functions take host pointers."""
    if tensor.device.type != "cpu":
        raise mismatch(f"{name}.device", tensor.device, "cpu")

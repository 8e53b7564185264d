"""What a module's forward computes besides calling its children, judged by the names in its code.

A probe does not reveal everything: a clamp that none of its values reaches, or a factor that is 1 at its positions,
leaves no trace. Operators have no names, but they change every value, which a probe does reveal.
"""

import dis
import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType

from torch import nn


def uses_only(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether its forward reads no attribute, method or global except these. Also False if there is no code to read."""
    code = _code(module)
    return code is not None and _names(code) <= names


def uses(module: nn.Module, name: str) -> bool:
    """Whether its forward is known to read an attribute, method or global of this name."""
    code = _code(module)
    return code is not None and name in _names(code)


def reads_weight_of(module: nn.Module, child: str) -> bool:
    """Whether its forward may read the weight of this child: it reads a weight that is not clearly another child's."""
    code = _code(module)
    return code is not None and any(owner in (child, None) for owner in _owners_of_weights(code))


def _owners_of_weights(code: CodeType) -> Iterator[str | None]:
    """The attribute before each `.weight`; None if it is read from anything else than an attribute."""
    for before, instruction in pairwise(dis.get_instructions(code)):
        if instruction.argval == "weight" and instruction.opname != "LOAD_CONST":
            yield before.argval if before.opname == "LOAD_ATTR" else None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _owners_of_weights(constant)


def _code(module: nn.Module) -> CodeType | None:
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _names(code: CodeType) -> set[str]:
    """Including those in nested functions."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)

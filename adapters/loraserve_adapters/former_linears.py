"""The linears that a bare weight was made of: in transformers 4 each expert had its own, and the router was one.

Adapters from then have an A and a B for each linear, under its name. If the base has one weight for all experts of a
layer, with gate and up in one, the linears' matrices are combined: the ranks of gate and up follow each other, and in B
each has zeros where the other's outputs are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from loraserve_adapters.base_layout import BaseModule

_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MIXTRAL_BLOCK = "block_sparse_moe"


@dataclass(frozen=True, slots=True)
class FormerLinear:
    """One linear, or the same linear of each expert."""

    name: str
    """The module's name, with {} for the expert's number."""
    first_output: int
    """Among the outputs of the weight that it became a part of."""
    out_features: int

    def of_expert(self, expert: int) -> str:
        """The module's name; for a router it does not depend on the number."""
        return self.name.format(expert)


def former_linears(module: BaseModule) -> Iterator[list[FormerLinear]]:
    """In order of the weight's outputs, once for each set of names that they may have had: today's, Mixtral's, and
    Mixtral's below its name for the block. Yields nothing for a linear."""
    if module.num_matrices is None:
        return
    container = module.name.rpartition(".")[0]
    block, _, last = container.rpartition(".")
    of_mixtral = f"{block.rpartition('.')[0]}.{_MIXTRAL_BLOCK}.{last}"
    if module.is_router:
        names = [[container], [of_mixtral]]
    else:
        linears = module.expert_linears
        mixtral = [_MIXTRAL[linear] for linear in linears]
        spelled = ((container, linears), (container, mixtral), (of_mixtral, mixtral))
        names = [[f"{where}.{{}}.{linear}" for linear in names] for where, names in spelled]
    for of_weight in names:
        out_features = module.out_features // max(1, len(of_weight))
        yield [FormerLinear(name, n * out_features, out_features) for n, name in enumerate(of_weight)]

"""The linears that a bare weight was made of: in transformers 4 each expert had its own, and the router was one.

Adapters from then have an A and a B for each, by its name. Where the base holds one weight for all experts of a layer,
with gate and up in one, these are put together: the ranks of gate and up follow each other, and in B each has zeros
where the other's outputs are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from loraserve_adapters.base_layout import BaseModule

_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MIXTRAL_BLOCK = "block_sparse_moe"


@dataclass(frozen=True, slots=True)
class FormerLinear:
    """One linear, or one of each expert."""

    name: str
    """The module's, with {} for the expert's number."""
    first_output: int
    """Of the weight's that it became a part of."""
    out_features: int

    def of_expert(self, expert: int) -> str:
        """The module's name; of a router whatever the number."""
        return self.name.format(expert)


def former_linears(module: BaseModule) -> Iterator[list[FormerLinear]]:
    """In order of the weight's outputs, by each of the names that they may have had: today's, Mixtral's, and those
    below Mixtral's name for the block. Of a linear there are none."""
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

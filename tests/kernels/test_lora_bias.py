import pytest
import torch
from loraserve_kernels.lora_add import make_lora_inputs
from loraserve_kernels.lora_bias import lora_bias_add


def test_adds_scaled_biases_to_the_rows_and_columns_of_their_members_only() -> None:
    inputs = make_lora_inputs([2, 1, 0, 3], [-1, 0, 1, 1], [(3, 3), (2, 2)], 8, (5, 7))
    table = inputs.table
    table.offset_bias = torch.full((2, 4), -1)
    bias = torch.arange(7.0)
    table.arena = torch.cat([table.arena, bias])
    # Slot 0: the second member; slot 1: none.
    table.offset_bias[0, 3] = table.arena.numel() - 7
    expected = inputs.y.clone()
    expected[2:3, 5:] += bias * table.scaling[0, 3]
    lora_bias_add(inputs.y, inputs.group, table, inputs.segments)
    assert torch.equal(inputs.y, expected)


def test_refuses_a_bias_outside_the_arena() -> None:
    inputs = make_lora_inputs([1], [0], [(2,)], 8, (5,))
    inputs.table.offset_bias = torch.full((1, 3), inputs.table.arena.numel() - 4)
    with pytest.raises(ValueError, match="bias offset"):
        lora_bias_add(inputs.y, inputs.group, inputs.table, inputs.segments)

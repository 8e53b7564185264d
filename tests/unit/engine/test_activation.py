from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.lora.variants import calculate_alora_offsets

from loraserve.engine.activation import last_invocation

FEW_TOKENS = st.integers(0, 2)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(FEW_TOKENS, min_size=1, max_size=12), st.lists(FEW_TOKENS, min_size=1, max_size=4))
def test_last_invocation_is_where_peft_activates_the_adapter(prompt: list[int], invocation: list[int]) -> None:
    configs: Any = {"default": LoraConfig(alora_invocation_tokens=invocation, task_type="CAUSAL_LM")}
    (offset,) = calculate_alora_offsets(configs, "default", torch.tensor([prompt]))
    assert last_invocation(prompt, invocation) == (None if offset is None else len(prompt) - offset)

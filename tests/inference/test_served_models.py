"""Families that the oracle leaves out: loading proves their logits."""

from collections.abc import Callable

import pytest
from loraserve_kernels.reference_backend import ReferenceBackend
from transformers import (
    GraniteMoeConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HunYuanMoEV1Config,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from loraserve.models.causal_model import CausalModel
from tests.support.tiny_models import COMMON, WINDOW, random_model

LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
SERVED: dict[str, Callable[[], PreTrainedConfig]] = {
    "granitemoe": lambda: GraniteMoeConfig(**COMMON, **LOCAL_EXPERTS),
    "granitemoe_swa": lambda: GraniteMoeSWAConfig(**COMMON, **LOCAL_EXPERTS, sliding_window=WINDOW),
    "granite_swa": lambda: GraniteSWAConfig(**COMMON, sliding_window=WINDOW),
    "hunyuan_v1_moe": lambda: HunYuanMoEV1Config(**COMMON, head_dim=16, num_experts=4, moe_topk=2),
    "olmoe": lambda: OlmoeConfig(**COMMON, **EXPERTS),
    "phimoe": lambda: PhimoeConfig(**COMMON, **LOCAL_EXPERTS),
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, **EXPERTS, head_dim=16, moe_intermediate_size=32),
}


@pytest.mark.parametrize("name", sorted(SERVED))
def test_serves(name: str) -> None:
    CausalModel(random_model(SERVED[name]()), ReferenceBackend()).prepare(128, 260, lambda *_: None)

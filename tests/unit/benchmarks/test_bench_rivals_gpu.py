"""PEFT and transformers run as in the GPU benchmark, with a tiny model on the CPU."""

import time

import pytest
import torch
from bench_rivals_gpu import Adapters, Point, measure
from gpu.llama import DTYPE
from gpu.record import TIME_OVER, Arm, Figure, LeftOut, Record
from gpu.work import AdapterKind, Work
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=False,
)
KIND = AdapterKind("r4", (4,))
WORK = Work(num_tokens=6, kind=KIND)


def about(record: Record) -> tuple[Arm, Figure, int, int, int, int]:
    size, count = record.batch_size, record.num_adapters
    return record.arm, record.figure, size, count, record.prompt_tokens, record.output_tokens


def test_transformers_and_peft_are_measured_at_every_point() -> None:
    points = (Point(2, 0, 4), Point(3, 2, 5))
    found = list(measure(CONFIG, points, WORK, "cpu", time.monotonic() + 600))
    records = [each for each in found if isinstance(each, Record)]
    assert [about(record) for record in records] == [
        (Arm.TRANSFORMERS, Figure.DECODE_STEP, 2, 0, 6, 4),
        (Arm.TRANSFORMERS, Figure.OUTPUT, 2, 0, 6, 4),
        (Arm.PEFT, Figure.DECODE_STEP, 3, 2, 6, 5),
        (Arm.PEFT, Figure.OUTPUT, 3, 2, 6, 5),
    ]
    assert len(records) == len(found)
    assert all(record.value > 0 for record in records if record.figure is Figure.OUTPUT)


def test_points_after_the_deadline_are_listed_as_left_out() -> None:
    points = (Point(1, 0, 2), Point(4, 2, 2))
    left_out = [LeftOut("transformers B1 D0", TIME_OVER), LeftOut("peft B4 D2", TIME_OVER)]
    assert list(measure(CONFIG, points, WORK, "cpu", time.monotonic() - 1)) == left_out


def test_adapters_are_distinct_and_nonzero_in_the_models_dtype() -> None:
    adapters = Adapters(AutoModelForCausalLM.from_config(CONFIG, dtype=DTYPE).eval(), KIND, "cpu")
    adapters.model_with(1)
    model = adapters.model_with(2)
    assert isinstance(model, PeftModel)
    assert not model.training
    first, second = (
        [parameter for name, parameter in model.named_parameters() if f".adapter-{index}." in name]
        for index in range(2)
    )
    assert len(first) == len(second) == 2 * 7 * CONFIG.num_hidden_layers
    assert {parameter.dtype for parameter in (*first, *second)} == {DTYPE}
    assert all(bool(parameter.any()) for parameter in (*first, *second))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_base_model_cannot_be_used_after_adapters_were_added() -> None:
    adapters = Adapters(AutoModelForCausalLM.from_config(CONFIG, dtype=DTYPE).eval(), KIND, "cpu")
    adapters.model_with(1)
    with pytest.raises(AssertionError, match="has adapters already"):
        adapters.model_with(0)

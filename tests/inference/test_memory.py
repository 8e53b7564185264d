"""Weights are packed module by module, so that loading needs little more memory than the weights."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.tiny_models import tiny_tokenizer

MEASURE = """
import sys, torch, transformers
from loraserve.engine.config import EngineConfig
from loraserve.engine.engine import Engine
from transformers import AutoModelForCausalLM, LlamaForCausalLM

def peak_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak_kib()
Engine(EngineConfig(model=sys.argv[1], dtype=sys.argv[2], num_threads=2), lambda *_: None)
print(peak_kib() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_loading_is_at_most_1_2_times_the_weights(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=256,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), "float32"], check=True, capture_output=True, text=True
    ).stdout
    assert int(output.split()[-1]) * 1024 <= 1.2 * weight_bytes

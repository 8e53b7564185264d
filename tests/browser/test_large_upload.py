"""An adapter of 200 MB, which only a base larger than the demo's can have."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from playwright.sync_api import Browser, expect
from safetensors.torch import save_file
from transformers import LlamaConfig

import loraserve.demo
from tests.browser.conftest import watched_console
from tests.support.server_process import serve, stop

MODEL_DIR = Path(loraserve.demo.__file__).parent / "model"
RANK = 320
UPLOAD_MS = 120_000
BASE = LlamaConfig(
    vocab_size=2048,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)


def write_base(folder: Path) -> Path:
    """Of about 85 M parameters, without weights: the server makes some up. Its tokenizer is the demo's."""
    demo = json.loads((MODEL_DIR / "config.json").read_text())
    BASE.vocab_size = demo["vocab_size"]
    BASE.architectures = ["LlamaForCausalLM"]
    BASE.save_pretrained(folder)
    for file in MODEL_DIR.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template", "generation_config")):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def write_adapter(folder: Path) -> Path:
    """On all linears, in float32."""
    kv_size = BASE.num_key_value_heads * BASE.head_dim
    hidden, middle = BASE.hidden_size, BASE.intermediate_size
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv_size),
        "self_attn.v_proj": (hidden, kv_size),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, middle),
        "mlp.up_proj": (hidden, middle),
        "mlp.down_proj": (middle, hidden),
    }
    tensors = {}
    for layer in range(BASE.num_hidden_layers):
        for name, (width_in, width_out) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.full((RANK, width_in), 0.001)
            tensors[f"{prefix}.lora_B.weight"] = torch.full((width_out, RANK), 0.001)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.split(".")[1] for name in shapes]
    LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets, inference_mode=True).save_pretrained(str(folder))
    return folder


@pytest.mark.slow
def test_a_large_adapter_is_sent_in_chunks_with_its_progress(browser: Browser, tmp_path: Path):
    base = write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "large")
    size_bytes = (adapter / "adapter_model.safetensors").stat().st_size
    assert size_bytes > 200_000_000
    options = ("--load-format", "dummy", "--max-lora-rank", str(RANK), "--max-model-len", "256")
    with serve(tmp_path / "data", str(base), *options) as server:
        with watched_console(browser, server.url, 390, 844, "dark") as console:
            chunks: list[str] = []
            console.page.on(
                "request", lambda request: chunks.append(request.method) if "/files/" in request.url else None
            )
            console.upload("large", adapter)
            bar = console.page.get_by_role("progressbar", name="adapter_model.safetensors")
            expect(bar).to_be_visible()
            expect(console.page.get_by_test_id("upload-ready")).to_be_visible(timeout=UPLOAD_MS)
            (session,) = console.page.request.get(f"{server.url}/v1/uploads").json()["data"]
            assert len(chunks) >= 1 + size_bytes // session["chunk_bytes"]
        stop(server)

"""An adapter of 200 MB, which requires a base model larger than the demo's."""

import json
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, expect
from safetensors.numpy import save_file

import loraserve.demo
from tests.browser.conftest import watched_console
from tests.support.server_process import serve, stop
from tests.unit.adapters.folders import config_of, lora_key

MODEL_DIR = Path(loraserve.demo.__file__).parent / "model"
RANK = 320
UPLOAD_MS = 240_000
LAYERS, HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD_SIZE = 12, 768, 2048, 12, 4, 64


def write_base(folder: Path) -> Path:
    """A base of about 85 M parameters without weights: the server makes up dummy ones. Its tokenizer is the demo's."""
    demo = json.loads((MODEL_DIR / "config.json").read_text())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": demo["vocab_size"],
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for file in MODEL_DIR.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template", "generation_config")):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def write_adapter(folder: Path) -> Path:
    """An adapter on all linear layers, in float32."""
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD_SIZE),
        "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_SIZE),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (HIDDEN, MIDDLE),
        "mlp.up_proj": (HIDDEN, MIDDLE),
        "mlp.down_proj": (MIDDLE, HIDDEN),
    }
    tensors = {}
    for layer in range(LAYERS):
        for name, (width_in, width_out) in shapes.items():
            module = f"model.layers.{layer}.{name}"
            tensors[lora_key(module, "A")] = np.full((RANK, width_in), 0.001, np.float32)
            tensors[lora_key(module, "B")] = np.full((width_out, RANK), 0.001, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = [name.split(".")[1] for name in shapes]
    config = config_of(r=RANK, lora_alpha=RANK, target_modules=targets)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_a_large_adapter_is_sent_in_chunks_with_a_progress_bar(browser: Browser, tmp_path: Path):
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

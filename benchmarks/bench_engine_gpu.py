"""The engine on a GPU without HTTP: an 8-billion-parameter Llama's shapes with random weights.

T1: B requests at once, 128 tokens in and out, with D distinct adapters of rank 16 on all linears; D = 0 also with an
engine that has no LoRA. T3: time to the first token with an adapter still on the host, and with the same adapter
once it is on the GPU. T5: where the time of a decode step goes.

Run: PYTHONPATH=.:kernels:adapters python benchmarks/bench_engine_gpu.py
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
from gpu_timing import require_cuda
from loraserve_adapters.pack import load_and_pack
from loraserve_adapters.packed_file import packed_file_name, write_packed
from peft import LoraConfig
from safetensors.torch import save_file
from shapes import ALL_LINEAR, tokenizer_of
from transformers import LlamaConfig

from loraserve.engine.config import EngineConfig
from loraserve.engine.engine import Engine
from loraserve.engine.errors import EngineStartError
from loraserve.engine.request import EngineRequest, SamplingParams

RANK = 16
NUM_TOKENS = 128
"""In and out of a T1 request."""
BATCH_SIZES = (1, 16, 64)
ADAPTER_BYTES = 8 << 30
"""67 adapters of 84 MB, and room."""
PROMPTS = (16, 512, 2048)
PROFILED_STEPS = 24


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement; `value` in `unit`, the others say of what."""

    test: str
    arm: str
    batch_size: int
    num_adapters: int
    prompt_tokens: int
    what: str
    value: float
    unit: str


def llama_8b() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


def start_engine(config: LlamaConfig, folder: Path, device: str, *, enable_lora: bool) -> Engine:
    """Random weights; the folder gets configuration and tokenizer. Raises `EngineStartError`."""
    if not folder.exists():
        config.save_pretrained(folder)
        tokenizer_of(config.vocab_size).save_pretrained(folder)
    settings = EngineConfig(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        device=device,
        max_num_seqs=max(BATCH_SIZES),
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        enable_lora=enable_lora,
        adapter_memory_bytes=ADAPTER_BYTES if enable_lora else None,
    )
    return Engine(settings, lambda *_: None)


def add_adapters(engine: Engine, config: LlamaConfig, folder: Path, count: int) -> list[str]:
    """Digests of `count` adapters with the same matrices, each a file and, when used, device memory of its own."""
    source, packed_folder, layout = folder / "adapter", folder / "packed", engine.describe().layout
    if not source.exists():
        _write_adapter(config, source)
    packed = load_and_pack(source, layout, packed_folder)
    digests = [sha256(f"adapter {index}".encode()).hexdigest() for index in range(count)]
    for digest in digests:
        path = packed_folder / packed_file_name(digest, layout)
        if not path.exists():
            write_packed(replace(packed, digest=digest), path)
        engine.load_adapter(digest, str(path))
    return digests


def _write_adapter(config: LlamaConfig, folder: Path) -> None:
    hidden, inner = config.hidden_size, config.intermediate_size
    assert config.num_key_value_heads is not None
    assert config.head_dim is not None
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    widths = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    torch.manual_seed(0)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for linear, (width_in, width_out) in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.{linear}"
            tensors[f"{prefix}.lora_A.weight"] = (torch.randn(RANK, width_in) * 0.02).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = (torch.randn(width_out, RANK) * 0.02).bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter_config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=ALL_LINEAR, inference_mode=True)
    adapter_config.save_pretrained(str(folder))


def add_requests(engine: Engine, prefix: str, digests: Sequence[str | None], num_prompt: int, num_output: int) -> None:
    """One request for each entry of `digests`; random prompts."""
    sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    vocab_size = engine.describe().vocab_size
    for index, digest in enumerate(digests):
        prompt = torch.randint(vocab_size, (num_prompt,)).tolist()
        engine.add_request(EngineRequest(f"{prefix}-{index}", prompt, sampling, digest))


def step_times(engine: Engine, num_rows: int) -> Iterator[float]:
    """Seconds of each step with `num_rows` tokens, until the engine is idle. A step ends when its tokens are here."""
    while engine.has_work():
        started = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - started
        errors = [output.error for output in outputs if output.error]
        assert not errors, errors
        if len(outputs) == num_rows:
            yield seconds


def closed_loop(engine: Engine, arm: str, batch_size: int, digests: Sequence[str]) -> list[Record]:
    """T1. The first round warms up: it compiles, and brings the adapters to the device."""
    shared = [digests[index % len(digests)] if digests else None for index in range(batch_size)]
    add_requests(engine, "warm", shared, NUM_TOKENS, 8)
    list(step_times(engine, batch_size))
    add_requests(engine, "work", shared, NUM_TOKENS, NUM_TOKENS)
    started = time.perf_counter()
    times = list(step_times(engine, batch_size))[1:]
    seconds = time.perf_counter() - started
    about = Record("T1", arm, batch_size, len(digests), NUM_TOKENS, "decode step", 0.0, "ms")
    deciles = statistics.quantiles(times, n=10)
    return [
        replace(about, value=statistics.median(times) * 1e3),
        replace(about, what="decode step p90", value=deciles[-1] * 1e3),
        replace(about, what="output", value=batch_size * NUM_TOKENS / seconds, unit="tokens/s"),
    ]


def cold_start(engine: Engine, used_digest: str, cold_digests: Sequence[str]) -> list[Record]:
    """T3. Each prompt length takes one adapter that was never used; another one has the kernels compiled before."""
    records = []
    for num_prompt, digest in zip(PROMPTS, cold_digests, strict=True):
        add_requests(engine, "warm", [used_digest], num_prompt, 1)
        list(step_times(engine, 1))
        for what in ("first token, adapter on the host", "first token, adapter on the device"):
            add_requests(engine, "timed", [digest], num_prompt, 1)
            started = time.perf_counter()
            list(step_times(engine, 1))
            milliseconds = (time.perf_counter() - started) * 1e3
            records.append(Record("T3", "lora", 1, 1, num_prompt, what, milliseconds, "ms"))
    return records


def profile_steps(engine: Engine, arm: str, batch_size: int, digests: Sequence[str]) -> list[Record]:
    """T5, of pure decode steps. Profiling slows the host, so its share is of a profiled step."""
    shared = [digests[index % len(digests)] if digests else None for index in range(batch_size)]
    add_requests(engine, "profiled", shared, NUM_TOKENS, PROFILED_STEPS + 8)
    while len(engine.step()) < batch_size:
        pass
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.profiler.profile(activities=activities) as profiler:
        started = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            engine.step()
        seconds = time.perf_counter() - started
    list(step_times(engine, batch_size))
    on_device = [event for event in profiler.events() or [] if event.device_type.name == "CUDA"]
    busy_ms = sum(event.time_range.elapsed_us() for event in on_device) / 1e3
    num_uploads = sum("HtoD" in event.name for event in on_device)
    about = Record("T5", arm, batch_size, len(digests), NUM_TOKENS, "profiled step", 0.0, "ms")
    return [
        replace(about, value=seconds * 1e3 / PROFILED_STEPS),
        replace(about, what="GPU busy", value=busy_ms / PROFILED_STEPS),
        replace(about, what="copies to the GPU a step", value=num_uploads / PROFILED_STEPS, unit=""),
        replace(about, what="kernels and copies a step", value=len(on_device) / PROFILED_STEPS, unit=""),
    ]


def measure(config: LlamaConfig, folder: Path, device: str, end: float) -> Iterator[Record]:
    """Stops before the next measurement once `end` (of `time.monotonic`) is past."""
    engine = start_engine(config, folder / "model", device, enable_lora=False)
    for batch_size in BATCH_SIZES:
        if time.monotonic() < end:
            yield from closed_loop(engine, "no lora", batch_size, [])
    del engine
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    engine = start_engine(config, folder / "model", device, enable_lora=True)
    digests = add_adapters(engine, config, folder, max(BATCH_SIZES) + len(PROMPTS))
    cold, digests = digests[: len(PROMPTS)], digests[len(PROMPTS) :]
    if time.monotonic() < end:
        yield from cold_start(engine, digests[0], cold)
    for batch_size in BATCH_SIZES:
        for num_adapters in sorted({0, 1, min(8, batch_size), batch_size}):
            if time.monotonic() < end:
                yield from closed_loop(engine, "lora", batch_size, digests[:num_adapters])
        if time.monotonic() < end:
            yield from profile_steps(engine, "lora", batch_size, digests[:batch_size])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--budget-s", type=float, default=180, help="start no measurement after so many seconds")
    args = parser.parse_args()
    require_cuda()
    end = time.monotonic() + args.budget_s
    in_memory = Path("/dev/shm")  # 6 GB of adapters
    records: list[Record] = []
    with tempfile.TemporaryDirectory(dir=in_memory if in_memory.is_dir() else None) as folder:
        try:
            for record in measure(llama_8b(), Path(folder), "cuda", end):
                records.append(record)
                print_record(record)
                if args.json:
                    args.json.write_text(json.dumps({"results": [asdict(each) for each in records]}, indent=1) + "\n")
        except EngineStartError as error:
            sys.exit(f"The engine does not start on this GPU: {error}")


def print_record(record: Record) -> None:
    print(
        f"{record.test} {record.arm:8} B{record.batch_size:<4} D{record.num_adapters:<4} "
        f"{record.prompt_tokens:5} in  {record.what:36} {record.value:10.2f} {record.unit}",
        flush=True,
    )


if __name__ == "__main__":
    main()

"""An engine with random weights for the GPU benchmarks, its adapters, and loops that time what it does."""

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import cycle
from pathlib import Path

import torch
from gpu.llama import adapter_bytes, kv_bytes_per_token, num_adapter_matrices, save_adapter
from gpu.work import AdapterKind, Work
from loraserve_adapters.pack import load_and_pack
from loraserve_adapters.packed import ALIGNMENT_BYTES
from loraserve_adapters.packed_file import packed_file_name, write_packed
from shapes import tokenizer_of
from transformers import LlamaConfig

from loraserve.engine.config import EngineConfig
from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams, SequenceOutput
from loraserve.serving.process.garbage_collector import tune_garbage_collector

BLOCK_TOKENS = 16
"""Tokens of a KV block; a sequence's last block is only partly filled."""


def start_engine(config: LlamaConfig, work: Work, folder: Path, device: str, *, enable_lora: bool) -> Engine:
    """Writes configuration and tokenizer to the folder. Raises `EngineStartError`.

    The device has room for as many adapters as a batch of `work.kind` has at most, the host for the cold ones as well.
    The KV cache leaves room for a second engine.
    """
    if not folder.exists():
        config.save_pretrained(folder)
        tokenizer_of(config.vocab_size).save_pretrained(folder)
    adapter = _packed_bytes(config, work.kind)
    num_on_host = work.max_adapters + work.num_cold_adapters
    settings = EngineConfig(
        model=str(folder),
        load_format="dummy",
        dtype=work.dtype,
        device=device,
        max_num_seqs=work.max_batch_size,
        max_num_batched_tokens=work.max_num_batched_tokens,
        kv_cache_memory_bytes=work.kv_cache_memory_bytes or _kv_cache_bytes(config, work),
        enable_prefix_caching=False,
        num_speculative_tokens=0,  # a measured step has one row per sequence
        enable_lora=enable_lora,
        seed=work.seed,
        adapter_memory_bytes=arena_bytes(config, work) if enable_lora else None,
        adapter_host_memory_bytes=num_on_host * adapter if enable_lora and device != "cpu" else None,
    )
    engine = Engine(settings, lambda *_: None)
    tune_garbage_collector()  # as in a server
    return engine


def _kv_cache_bytes(config: LlamaConfig, work: Work) -> int:
    """Room for a quarter more than the most tokens that exist at once."""
    decoded = work.max_batch_size * 2 * work.num_tokens
    tokens = max(decoded, *(each.batch_size * each.prompt_tokens for each in work.prefills), *work.cold_prompts)
    return (tokens * 5 // 4 + work.max_batch_size * BLOCK_TOKENS) * kv_bytes_per_token(config)


def arena_bytes(config: LlamaConfig, work: Work) -> int:
    return work.max_adapters * _packed_bytes(config, work.kind)


def folder_bytes(config: LlamaConfig, work: Work) -> int:
    """Upper bound for the adapter files that exist at once, except those on disk. Includes two files per rank, from
    which all others are made."""
    kind = work.kind
    num_adapters = kind.num_adapters + work.num_cold_adapters + 2 * len(kind.lora_ranks)
    others = [
        (other.num_adapters + 2 * len(other.lora_ranks)) * _packed_bytes(config, other) for other in work.other_kinds
    ]
    return max(num_adapters * _packed_bytes(config, kind), *others)


def _packed_bytes(config: LlamaConfig, kind: AdapterKind) -> int:
    """Upper bound of an adapter's bytes, averaged over the ranks: every matrix is aligned."""
    return int(adapter_bytes(config, kind)) + num_adapter_matrices(config) * ALIGNMENT_BYTES


def add_adapters(
    engine: Engine, config: LlamaConfig, kind: AdapterKind, folder: Path, count: int, first: int = 0
) -> dict[str, Path]:
    """Files of `count` new adapters by digest. Those of a rank have the same matrices, but each has its own file and,
    when used, its own device memory.

    first: another number makes other adapters. The host's memory takes the earliest ones, as long as it has room.
    """
    packed_folder, layout = folder / "packed", engine.describe().layout
    sources = []
    for lora_rank in kind.lora_ranks:
        save_adapter(config, kind, lora_rank, folder / f"r{lora_rank}")
        sources.append(load_and_pack(folder / f"r{lora_rank}", layout, packed_folder))
    digests = [sha256(f"{kind.name} {index}".encode()).hexdigest() for index in range(first, first + count)]
    paths = {digest: packed_folder / packed_file_name(digest, layout) for digest in digests}
    for (digest, path), packed in zip(paths.items(), cycle(sources), strict=False):
        write_packed(replace(packed, digest=digest), path)
        engine.load_adapter(digest, str(path))
    return paths


def remove_adapters(engine: Engine, digests: Iterable[str], folder: Path) -> None:
    """Also deletes their folder."""
    for digest in digests:
        engine.unload_adapter(digest)
    shutil.rmtree(folder)


def share(digests: Sequence[str], batch_size: int) -> list[str | None]:
    """Cycles through the adapters; None = the base model, if there are none."""
    return [digests[index % len(digests)] if digests else None for index in range(batch_size)]


def make_requests(
    engine: Engine, digests: Sequence[str | None], num_prompt: int, num_output: int
) -> list[EngineRequest]:
    """One request for each entry of `digests`, with random prompts."""
    sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    vocab_size = engine.describe().vocab_size
    return [
        EngineRequest(f"request-{index}", torch.randint(vocab_size, (num_prompt,)).tolist(), sampling, digest)
        for index, digest in enumerate(digests)
    ]


def step_times(engine: Engine, num_rows: int) -> Iterator[float]:
    """Seconds of each step in which `num_rows` sequences get tokens, until the engine is idle."""
    while engine.has_work():
        started = time.perf_counter()
        outputs = checked(engine.step())
        seconds = time.perf_counter() - started
        if len(outputs) == num_rows:
            yield seconds


def first_tokens_s(engine: Engine, requests: Sequence[EngineRequest]) -> float:
    """Seconds from the arrival of all requests, of one token each, until every one has it. Leaves the engine idle."""
    started = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    num_missing = len(requests)
    while num_missing:
        num_missing -= len(checked(engine.step()))
    seconds = time.perf_counter() - started
    while engine.has_work():
        checked(engine.step())
    return seconds


def checked(outputs: list[SequenceOutput]) -> list[SequenceOutput]:
    """The outputs that have tokens; fails if any has an error."""
    errors = [output.error for output in outputs if output.error]
    assert not errors, errors
    return [output for output in outputs if output.token_ids]

"""Prints the kernels that each given engine would have to compile after its start, while it serves: one JSON list per
line and engine. Each engine runs in a process forked by this one, which imports torch and transformers once for all.

A program of its own, like `compile_for_gpus.py`. Kernels are neither compiled nor launched: Triton only reports which
variant of each it would use. So results, and the checks at load time, mean nothing. Linears are not multiplied either,
which took 41 of 58 s on a CPU without bfloat16 products. Arguments: a folder to write to, and for each engine `graphs`
or `eager`, max_num_seqs and max_num_batched_tokens.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from loraserve_kernels.triton_backend import TritonBackend
from torch import Tensor
from transformers import LlamaConfig
from triton import knobs
from triton.runtime import driver

from loraserve.engine import startup
from loraserve.engine.config import EngineConfig
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.engine.sampling.device_sampler import DeviceSampler
from loraserve.engine.sampling.row import SamplingRow
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.sequence import RequestState
from loraserve.engine.scheduling.sequence import Sequence as EngineSequence
from loraserve.models import self_check
from tests.kernels.compile_for_gpus import AbsentGpuDriver
from tests.support.host_accelerator import HostAccelerator
from tests.support.tiny_models import COMMON, tiny_tokenizer

MIB = 1 << 20
BLOCK_SIZE = 16
SHAPE = {
    "hidden_size": 1024,  # large enough that sums over it are split into planes
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
}


class Variants:
    """Variants of kernels, in the order in which they were first needed."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        knobs.runtime.jit_cache_hook = self._note

    def _note(self, *, key: str, fn: object, **_: object) -> bool:
        self.found.setdefault(f"{fn.name} {key}", fn.name.rsplit(".", 1)[-1])
        return True  # do not compile it


def start(folder: Path, *, is_eager: bool, max_num_seqs: int, max_num_rows: int) -> startup.EngineParts:
    LlamaConfig(**COMMON | SHAPE).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    startup.accelerator_of = lambda _: HostAccelerator(free=256 * MIB)
    startup.choose_backend = lambda *_: (TritonBackend(), "")
    self_check.require_equal = lambda *_: None
    self_check.is_equal = self_check.is_same = lambda *_: True
    config = EngineConfig(
        model=str(folder),
        tokenizer=str(folder / "tokenizer"),
        load_format="dummy",
        dtype="bfloat16",
        kv_cache_memory_bytes=16 * MIB,
        adapter_memory_bytes=8 * MIB,
        adapter_host_memory_bytes=0,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_rows,
        block_size=BLOCK_SIZE,
        enforce_eager=is_eager,
        num_threads=1,
    )
    return startup.start(config, lambda *_: None)


def scheduled(num_computed: int, num_rows: int, adapter_slot: int, num_sampled: int = 1) -> ScheduledSequence:
    token_ids = [1] * (num_computed + num_rows)
    request = EngineRequest("r", token_ids, SamplingParams(max_tokens=1))
    sequence = EngineSequence(RequestState(request, 0.0, b""), 0, token_ids, len(token_ids))
    sequence.num_computed_tokens = num_computed
    sequence.blocks = [0] * -(-len(token_ids) // BLOCK_SIZE)
    sequence.adapter_slot = adapter_slot
    return ScheduledSequence(sequence, num_rows, num_sampled)


def steps(max_num_seqs: int, max_num_rows: int) -> Sequence[list[ScheduledSequence]]:
    """Decode steps, prompts and both, from one sequence to the most possible, each with an adapter of its own."""
    found = []
    counts = sorted({1, 2, 3, 9, 30, 31, 33, 64, max_num_seqs})
    for count in (count for count in counts if count <= max_num_seqs):
        found.append([scheduled(300, 1, slot - 1) for slot in range(count)])
        for num_rows in (2, 7, 16, 17, 40, max_num_rows):
            fitting = min(num_rows, max_num_rows // count)
            if fitting > 1:
                prompts = [scheduled(0, fitting, slot) for slot in range(count)]
                found.append(prompts)
                found.append([scheduled(5, 1, -1), *prompts[1:]])
                found.append([scheduled(0, fitting, 0, fitting), *prompts[1:]])  # with prompt logprobs
    return found


def serve(parts: startup.EngineParts, batches: Sequence[list[ScheduledSequence]]) -> None:
    assert parts.accelerator is not None
    vocab_size = parts.description.vocab_size
    sampler = DeviceSampler(TritonBackend(), parts.accelerator, vocab_size, parts.description.max_num_seqs)
    for items in batches:
        logits = parts.runner.forward(parts.builder.build(items)).logits
        for temperature, bias in ((0.0, {}), (1.0, {}), (0.0, {3: 1.0}), (1.0, {3: 1.0})):
            params = SamplingParams(max_tokens=1, temperature=temperature, logit_bias=bias)
            row = SamplingRow(params, 1, 2, [], [], ())
            sampler.queue(logits[: len(items)], [row] * len(items))


def unmultiplied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replaces torch's linear: x [..., K], weight [N, K] -> zeros [..., N]."""
    del bias
    return x.new_zeros((*x.shape[:-1], weight.shape[0]))


def print_variants(folder: Path, mode: str, max_num_seqs: int, max_num_rows: int) -> None:
    torch.nn.functional.linear = unmultiplied
    driver.set_active(AbsentGpuDriver(90))
    variants = Variants()
    parts = start(folder, is_eager=mode == "eager", max_num_seqs=max_num_seqs, max_num_rows=max_num_rows)
    num_started = len(variants.found)
    assert num_started, "nothing was wanted at the start"
    with torch.inference_mode():
        serve(parts, steps(max_num_seqs, max_num_rows))
    print(json.dumps(sorted(list(variants.found.values())[num_started:])), flush=True)


def main() -> None:
    folder, words = Path(sys.argv[1]), iter(sys.argv[2:])
    for number, (mode, max_num_seqs, max_num_rows) in enumerate(zip(words, words, words, strict=True)):
        if (pid := os.fork()) == 0:
            print_variants(folder / str(number), mode, int(max_num_seqs), int(max_num_rows))
            return
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit(f"{mode} {max_num_seqs} {max_num_rows} ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()

"""Milliseconds per `Sampler.sample` on this machine, the median of `--repeats` steps."""

import argparse
import statistics
import time
from dataclasses import replace

import torch
from loraserve_kernels.choose_backend import choose_backend

from loraserve.engine.request import SamplingParams
from loraserve.engine.sampling.row import PenaltyState, SamplingRow
from loraserve.engine.sampling.sampler import Sampler

GREEDY = SamplingParams(max_tokens=256, temperature=0.0)
RANDOM = SamplingParams(max_tokens=256, temperature=0.8)
CASES = {
    "greedy": GREEDY,
    "greedy, penalties": replace(GREEDY, repetition_penalty=1.1, presence_penalty=0.2),
    "temperature": RANDOM,
    "min_p 0.05": replace(RANDOM, min_p=0.05),
    "top_k 20": replace(RANDOM, top_k=20),
    "top_k 20, top_p 0.8": replace(RANDOM, top_k=20, top_p=0.8),
    "top_p 0.9": replace(RANDOM, top_p=0.9),
    "temperature, penalties": replace(RANDOM, repetition_penalty=1.1, frequency_penalty=0.2),
    "greedy, 5 logprobs": replace(GREEDY, logprobs=5),
}


def make_logits(num_rows: int, vocab_size: int, num_likely: int, dtype: torch.dtype) -> torch.Tensor:
    """`num_likely` tokens share nearly all the probability, as in text; with `vocab_size`, the distribution is flat."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    likely = torch.rand(num_rows, vocab_size, generator=generator).topk(num_likely).indices
    return logits.scatter_add_(1, likely, torch.full(likely.shape, 14.0)).to(dtype)


def make_rows(params: SamplingParams, num_rows: int, vocab_size: int, num_prompt: int) -> list[SamplingRow]:
    rows = []
    for index in range(num_rows):
        prompt, output = torch.randint(vocab_size, (2, num_prompt)).tolist()
        rows.append(SamplingRow(params, index, 2 * num_prompt, prompt, output, (0,), PenaltyState(prompt)))
    return rows


def measure_ms(sampler: Sampler, logits: torch.Tensor, rows: list[SamplingRow], repeats: int) -> float:
    sampler.sample(logits, rows)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        sampler.sample(logits, rows)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["16x16000", "64x151936"], help="rows x vocabulary")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--backend", choices=["cpu", "reference"], default="cpu")
    parser.add_argument("--num-likely", type=int, default=50, help="tokens that share the probability")
    parser.add_argument("--num-prompt", type=int, default=512, help="number of prompt tokens, and of output tokens")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    backend, _ = choose_backend("cpu", args.backend)
    for shape in args.shapes:
        num_rows, vocab_size = map(int, shape.split("x"))
        logits = make_logits(num_rows, vocab_size, args.num_likely, getattr(torch, args.dtype))
        sampler = Sampler(vocab_size, vocab_size, backend)
        print(f"{num_rows} rows x {vocab_size} tokens, {args.dtype}, {args.backend}, {torch.get_num_threads()} threads")
        for name, params in CASES.items():
            rows = make_rows(params, num_rows, vocab_size, args.num_prompt)
            print(f"  {name:24} {measure_ms(sampler, logits, rows, args.repeats):8.2f} ms")


if __name__ == "__main__":
    main()

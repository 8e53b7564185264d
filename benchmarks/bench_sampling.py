"""µs of choosing tokens on a GPU, without host time, compared with torch's argmax and a sort of the vocabulary.

Run: PYTHONPATH=kernels python benchmarks/bench_sampling.py
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpu.kernel_bench import Case, run_bench
from gpu.timing import Call
from loraserve_kernels.logit_edits import RowEdits, fill_token_counts, pack_edits
from loraserve_kernels.sampling import make_logits, pack_draws
from torch import Tensor

VOCAB_SIZE = 128_256
NUM_ROWS = (1, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    is_greedy: bool = False
    top_k: int = 0
    top_p: float = 1.0
    has_penalties: bool = False
    num_likely: int = 50
    """Tokens that share the probability; `VOCAB_SIZE` = a flat distribution, whose nucleus must be searched for."""


CHOICES = (
    Choice("greedy", is_greedy=True),
    Choice("temperature"),
    Choice("top_k 20", top_k=20),
    Choice("top_k 20, top_p 0.8", top_k=20, top_p=0.8),
    Choice("top_p 0.9", top_p=0.9),
    Choice("top_p 0.9, flat", top_p=0.9, num_likely=VOCAB_SIZE),
    Choice("greedy, penalties", is_greedy=True, has_penalties=True),
    Choice("temperature, penalties", has_penalties=True),
)


def logits_of(choice: Choice, num_rows: int, seed: int) -> Tensor:
    return make_logits(num_rows, VOCAB_SIZE, choice.num_likely, torch.bfloat16, "cuda", seed)


def triton_call(choice: Choice, num_rows: int, seed: int) -> Call:
    from loraserve_kernels.triton_ops.sampling import sample

    logits = logits_of(choice, num_rows, seed)
    columns = [choice.top_k] * num_rows, [choice.top_p] * num_rows, [0.0] * num_rows
    draws = pack_draws([0.8] * num_rows, *columns, list(range(num_rows)), [seed] * num_rows, "cuda")
    edits = None
    if choice.has_penalties:
        counts = torch.zeros(num_rows, VOCAB_SIZE, dtype=torch.int32, device="cuda")
        for row in range(num_rows):
            fill_token_counts(counts[row], list(range(row, row + 512)), list(range(row, row + 256)))
        edits = pack_edits([RowEdits(repetition=1.1, frequency=0.2, count_row=row) for row in range(num_rows)], counts)
    return lambda: sample(logits, VOCAB_SIZE, None if choice.is_greedy else draws, edits)


def torch_call(choice: Choice, num_rows: int, seed: int) -> Call:
    """The argmax if greedy; otherwise a sort, the least that a sorting sampler must do."""
    logits = logits_of(choice, num_rows, seed)
    return (lambda: logits.argmax(-1)) if choice.is_greedy else (lambda: logits.sort(-1, descending=True))


def cases() -> Iterator[Case]:
    for choice in CHOICES:
        arms = {"triton": triton_call}
        if choice.name in ("greedy", "top_p 0.9"):
            arms["torch"] = torch_call
        element_bytes = 6 if choice.has_penalties else 2  # logits; with penalties also token counts
        for num_rows in NUM_ROWS:
            for arm, make in arms.items():
                yield Case(
                    f"{choice.name} R{num_rows}",
                    arm,
                    lambda seed, make=make, choice=choice, num_rows=num_rows: make(choice, num_rows, seed),
                    num_rows * VOCAB_SIZE * element_bytes,
                )


if __name__ == "__main__":
    run_bench("sampling", cases)

"""The requests every arm of the serving benchmark answers: same prompts, same lengths, same adapters."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkItem:
    prompt_token_ids: list[int]
    num_output_tokens: int
    adapter: int | None
    """Index of the adapter; None = the base model."""


def make_work(
    *,
    num_requests: int,
    num_adapters: int,
    vocab_size: int,
    prompt_mean: int = 128,
    output_mean: int = 64,
    spread: float = 0.5,
    seed: int = 0,
) -> list[WorkItem]:
    """Lengths uniform in mean * (1 ± spread). num_adapters 0 = base only; else adapters in turn, so that any
    `num_adapters` requests in a row differ.
    """
    rng = random.Random(seed)

    def length(mean: int) -> int:
        return rng.randint(round(mean * (1 - spread)), round(mean * (1 + spread)))

    return [
        WorkItem(
            [rng.randrange(vocab_size) for _ in range(length(prompt_mean))],
            length(output_mean),
            i % num_adapters if num_adapters else None,
        )
        for i in range(num_requests)
    ]

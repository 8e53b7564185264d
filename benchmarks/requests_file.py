"""The requests that every arm answers: drawn once per repeat and kept as JSON lines, which `loraserve bench --requests`
and the library arms read.

The mixes differ in the models that they request; prompts and lengths are the same in all of them.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

BASE = "base"
"""The name that every server gives to the model without an adapter."""


@dataclass(frozen=True, slots=True)
class Request:
    model: str
    prompt_token_ids: list[int]
    num_output_tokens: int


def draw_requests(
    models: list[str],
    *,
    vocab_size: int,
    seed: int = 0,
    prompt_mean: int = 128,
    output_mean: int = 64,
    spread: float = 0.5,
    prefix_tokens: int = 0,
) -> list[Request]:
    """One request per model, lengths uniform in mean * (1 ± spread). Each prompt begins with `prefix_tokens` more
    tokens, which all requests of its model share, whatever the seed."""
    rng = Random(seed)

    def length(mean: int) -> int:
        return rng.randint(round(mean * (1 - spread)), round(mean * (1 + spread)))

    def tokens(rng: Random, count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    prefixes = {model: tokens(Random(model), prefix_tokens) for model in set(models)}
    return [Request(model, prefixes[model] + tokens(rng, length(prompt_mean)), length(output_mean)) for model in models]


def in_turn(names: list[str], count: int) -> list[str]:
    """Cycles through the names: any `len(names)` in a row differ."""
    return [names[i % len(names)] for i in range(count)]


def zipf(names: list[str], count: int, s: float = 1.0) -> list[str]:
    """Draws the k-th name with a probability proportional to k ** -s."""
    return Random(0).choices(names, [(k + 1) ** -s for k in range(len(names))], k=count)


def write_requests(path: Path, requests: list[Request]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in requests))
    return path


def read_requests(path: Path) -> list[Request]:
    return [Request(**json.loads(line)) for line in path.read_text().splitlines()]


def num_output_tokens(path: Path) -> int:
    return sum(request.num_output_tokens for request in read_requests(path))

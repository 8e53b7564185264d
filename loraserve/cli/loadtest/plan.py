"""What a load test sends: every request with its adapter, lengths and time, drawn from one seed or read from a file
before it starts.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from random import Random

import msgspec

TOKEN_IDS = range(10, 250)
"""Ordinary tokens in every vocabulary; which ones does not change the work."""
WORDS = "the a red fox one two and runs over high low into green old river far stone".split()


class Distribution(StrEnum):
    """How requests spread over adapters."""

    ROUND_ROBIN = "round-robin"
    UNIFORM = "uniform"
    ZIPF = "zipf"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform over mean - spread … mean + spread, at least 1."""

    mean: int
    spread: int = 0

    def draw(self, random: Random) -> int:
        return max(1, random.randint(self.mean - self.spread, self.mean + self.spread))


@dataclass(frozen=True, slots=True)
class Workload:
    models: list[str]
    """Adapters and base, by the name requests give; for Zipf the most popular first."""
    num_requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    distribution: Distribution = Distribution.ROUND_ROBIN
    zipf_s: float = 1.0
    """The k-th model is asked in proportion to k ** -zipf_s."""
    text_prompts: bool = False
    """Words, one per token asked for, in place of token ids."""
    request_rate: float | None = None
    """Requests per second, whatever the server does; None = closed loop."""
    burstiness: float = 1.0
    """Of the gaps between requests: 1 = Poisson, below 1 = bursts, above 1 = more even."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    model: str
    prompt: list[int] | str
    prompt_tokens: int
    max_tokens: int
    at_s: float
    """After the start; 0 in a closed loop."""


class RecordedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a requests file, so that servers and libraries can answer literally the same requests."""

    model: str
    prompt_token_ids: list[int]
    num_output_tokens: int


def read_recorded(path: Path) -> list[RecordedRequest]:
    """Raises `msgspec.DecodeError` for lines that are no requests."""
    return msgspec.json.Decoder(RecordedRequest).decode_lines(path.read_bytes())


def replay(recorded: list[RecordedRequest], workload: Workload) -> list[PlannedRequest]:
    """All recorded requests in order, at the workload's times."""
    times_s = _times_s(replace(workload, num_requests=len(recorded)), Random(workload.seed))
    return [
        PlannedRequest(
            model=request.model,
            prompt=request.prompt_token_ids,
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.num_output_tokens,
            at_s=at_s,
        )
        for request, at_s in zip(recorded, times_s, strict=True)
    ]


def plan(workload: Workload) -> list[PlannedRequest]:
    random = Random(workload.seed)
    models = _models(workload, random)
    times_s = _times_s(workload, random)
    return [_request(workload, random, model, at_s) for model, at_s in zip(models, times_s, strict=True)]


def _request(workload: Workload, random: Random, model: str, at_s: float) -> PlannedRequest:
    prompt_tokens = workload.prompt_tokens.draw(random)
    prompt = random.choices(WORDS if workload.text_prompts else TOKEN_IDS, k=prompt_tokens)
    return PlannedRequest(
        model=model,
        prompt=" ".join(map(str, prompt)) if workload.text_prompts else [int(token) for token in prompt],
        prompt_tokens=prompt_tokens,
        max_tokens=workload.output_tokens.draw(random),
        at_s=at_s,
    )


def _models(workload: Workload, random: Random) -> list[str]:
    models, count = workload.models, workload.num_requests
    match workload.distribution:
        case Distribution.ROUND_ROBIN:
            return [models[i % len(models)] for i in range(count)]
        case Distribution.UNIFORM:
            return random.choices(models, k=count)
        case Distribution.ZIPF:
            weights = [(i + 1) ** -workload.zipf_s for i in range(len(models))]
            return random.choices(models, weights, k=count)


def _times_s(workload: Workload, random: Random) -> list[float]:
    if workload.request_rate is None:
        return [0.0] * workload.num_requests
    shape = workload.burstiness
    scale = 1 / (workload.request_rate * shape)
    return list(accumulate(random.gammavariate(shape, scale) for _ in range(workload.num_requests)))

"""Plans a load test: every request with its model, lengths and time, drawn from one seed before the test starts."""

from dataclasses import dataclass
from random import Random

from loraserve.cli.loadtest.arrivals import arrival_times_s
from loraserve.cli.loadtest.lengths import Lengths
from loraserve.cli.loadtest.popularity import Distribution, choose_models

TOKEN_IDS = range(10, 250)
"""Ordinary tokens in every vocabulary; their choice does not change the amount of work."""
WORDS = "the a red fox one two and runs over high low into green old river far stone".split()


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Every model has `count` prefixes of its own; each of its requests begins with one, drawn uniformly."""

    count: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    models: list[str]
    """Adapters and base model, by their names in requests; for Zipf the most popular first."""
    num_requests: int
    prompt_tokens: Lengths
    """Not counting a shared prefix."""
    output_tokens: Lengths
    prefixes: SharedPrefixes | None = None
    distribution: Distribution = Distribution.ROUND_ROBIN
    zipf_s: float = 1.0
    power_alpha: float = 1.0
    text_prompts: bool = False
    """Prompts of words, one per requested token, instead of token ids."""
    request_rate: float | None = None
    """Requests per second, however fast the server is; None = closed loop."""
    cv: float = 1.0
    """Coefficient of variation of the gaps between requests."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    model: str
    prompt: list[int] | str
    prompt_tokens: int
    max_tokens: int
    at_s: float
    """After the start; 0 in a closed loop."""


def plan(workload: Workload) -> list[PlannedRequest]:
    random, count = Random(workload.seed), workload.num_requests
    models = choose_models(
        workload.models,
        count,
        workload.distribution,
        random,
        zipf_s=workload.zipf_s,
        power_alpha=workload.power_alpha,
    )
    times_s = arrival_times_s(count, workload.request_rate, workload.cv, random)
    return [_request(workload, random, model, at_s) for model, at_s in zip(models, times_s, strict=True)]


def _request(workload: Workload, random: Random, model: str, at_s: float) -> PlannedRequest:
    own = _tokens(workload, random, workload.prompt_tokens.draw(random))
    tokens = _prefix(workload, random, model) + own
    return PlannedRequest(
        model=model,
        prompt=" ".join(map(str, tokens)) if workload.text_prompts else [int(token) for token in tokens],
        prompt_tokens=len(tokens),
        max_tokens=workload.output_tokens.draw(random),
        at_s=at_s,
    )


def _prefix(workload: Workload, random: Random, model: str) -> list[int | str]:
    if workload.prefixes is None:
        return []
    which = random.randrange(workload.prefixes.count)
    return _tokens(workload, Random(f"{workload.seed}/{model}/{which}"), workload.prefixes.num_tokens)


def _tokens(workload: Workload, random: Random, count: int) -> list[int | str]:
    return [*random.choices(WORDS if workload.text_prompts else TOKEN_IDS, k=count)]

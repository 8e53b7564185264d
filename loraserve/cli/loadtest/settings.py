"""What `loraserve bench` was asked for."""

from dataclasses import dataclass
from pathlib import Path

from loraserve.cli.loadtest.plan import Distribution, Lengths, Workload

DEFAULT_CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """One field per option of `loraserve bench`, by the option's name."""

    url: str
    api_key: str | None
    adapters: str
    distribution: str
    zipf_s: float
    num_requests: int
    concurrency: int | None
    request_rate: float | None
    burstiness: float
    prompt_tokens: int
    prompt_spread: int
    output_tokens: int
    output_spread: int
    text: bool
    chat: bool
    ignore_eos: bool
    temperature: float
    warm_up: int | None
    seed: int
    requests_file: Path | None
    """Send these instead of drawing requests."""
    json_file: Path | None

    @property
    def running_at_once(self) -> int | None:
        """None = open loop."""
        return None if self.request_rate else self.concurrency or DEFAULT_CONCURRENCY

    def workload(self, models: list[str]) -> Workload:
        return Workload(
            models=models,
            num_requests=self.num_requests,
            prompt_tokens=Lengths(self.prompt_tokens, self.prompt_spread),
            output_tokens=Lengths(self.output_tokens, self.output_spread),
            distribution=Distribution(self.distribution),
            zipf_s=self.zipf_s,
            text_prompts=self.text or self.chat,
            request_rate=self.request_rate,
            burstiness=self.burstiness,
            seed=self.seed,
        )

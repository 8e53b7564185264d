"""The settings of `loraserve bench`."""

from dataclasses import dataclass
from pathlib import Path

from loraserve.cli.loadtest.lengths import (
    SHAREGPT_OUTPUT,
    SHAREGPT_PROMPT,
    LengthLaw,
    Lengths,
    LognormalLengths,
    NormalLengths,
    UniformLengths,
)
from loraserve.cli.loadtest.plan import SharedPrefixes, Workload
from loraserve.cli.loadtest.popularity import Distribution
from loraserve.cli.loadtest.server_kind import ServerKind

DEFAULT_CONCURRENCY = 16
DEFAULT_NUM_REQUESTS = 100
DEFAULT_PROMPT_TOKENS = 128
DEFAULT_OUTPUT_TOKENS = 64

SLORA_TRACE: dict[str, object] = {
    "distribution": Distribution.POWER.value,
    "request_rate": 2.0,
    "duration": 300.0,
    "prompt_tokens": 260,
    "prompt_spread": 252,
    "output_tokens": 260,
    "output_spread": 252,
}
"""Options set by `--trace slora`: the synthetic traces of S-LoRA's paper, as run on its smallest GPU. Alpha and cv are
1, lengths uniform in 8 … 512."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """One field per option of `loraserve bench`, by the option's name."""

    url: str
    api_key: str | None
    server: str
    adapters: str
    num_adapters: int | None
    distribution: str
    zipf_s: float
    power_alpha: float
    num_requests: int | None
    concurrency: int | None
    request_rate: float | None
    cv: float
    duration: float | None
    lengths: str
    prompt_tokens: int | None
    prompt_spread: int
    output_tokens: int | None
    output_spread: int
    prefixes: int
    prefix_tokens: int
    text: bool
    chat: bool
    ignore_eos: bool
    temperature: float
    cold: bool
    warm_up: int | None
    seed: int
    requests_file: Path | None
    """Send these instead of drawing requests."""
    json_file: Path | None
    plot_file: Path | None

    @property
    def server_kind(self) -> ServerKind | None:
        """None = detect."""
        return None if self.server == "auto" else ServerKind(self.server)

    @property
    def running_at_once(self) -> int | None:
        """None = open loop."""
        return None if self.request_rate else self.concurrency or DEFAULT_CONCURRENCY

    def workload(self, models: list[str]) -> Workload:
        prompt_tokens, output_tokens = self._lengths()
        return Workload(
            models=models,
            num_requests=self._num_requests(),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefixes=SharedPrefixes(self.prefixes, self.prefix_tokens) if self.prefixes else None,
            distribution=Distribution(self.distribution),
            zipf_s=self.zipf_s,
            power_alpha=self.power_alpha,
            text_prompts=self.text or self.chat,
            request_rate=self.request_rate,
            cv=self.cv,
            seed=self.seed,
        )

    def _num_requests(self) -> int:
        if self.duration and self.request_rate:
            return max(1, round(self.duration * self.request_rate))
        return self.num_requests or DEFAULT_NUM_REQUESTS

    def _lengths(self) -> tuple[Lengths, Lengths]:
        """Lengths of prompts and of outputs."""
        prompt, output = self.prompt_tokens, self.output_tokens
        if self.lengths == LengthLaw.SHAREGPT:
            return (
                LognormalLengths(prompt or SHAREGPT_PROMPT.mean, SHAREGPT_PROMPT.sigma),
                LognormalLengths(output or SHAREGPT_OUTPUT.mean, SHAREGPT_OUTPUT.sigma),
            )
        law = NormalLengths if self.lengths == LengthLaw.NORMAL else UniformLengths
        return (
            law(prompt or DEFAULT_PROMPT_TOKENS, self.prompt_spread),
            law(output or DEFAULT_OUTPUT_TOKENS, self.output_spread),
        )

"""A workload: model, adapters and requests, each created when an arm first needs it."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import shapes
from requests_file import BASE, Request, draw_requests, in_turn, write_requests, zipf

OUT = Path(__file__).parent / "out"
CONCURRENCY = 16


@dataclass(frozen=True)
class Work:
    folder: Path
    """For the requests files."""
    shape: str
    num_requests: int
    num_adapters: int = 16
    prompt_mean: int = 128
    output_mean: int = 64
    prefix_tokens: int = 0
    """Each model's prompts begin with this many tokens of its own."""
    spread: float = 0.5
    name: str = field(kw_only=True)
    """First part of its files' names."""
    keeps_servers: bool = False
    """Whether servers stay up through all repeats. They must fit into memory together, and no repeat may find another
    repeat's prompts in their caches, as it would with a prefix."""

    @cached_property
    def model(self) -> Path:
        return shapes.make_model(self.shape, OUT)

    @cached_property
    def adapters(self) -> list[Path]:
        return list(shapes.make_adapters(self.shape, OUT, self.num_adapters).values())

    def adapters_for(self, mix: str) -> list[Path]:
        return [] if mix == "base" else self.adapters

    @property
    def dtype(self) -> str:
        return str(shapes.shapes()[self.shape].dtype).removeprefix("torch.")

    def requests(self, mix: str, repeat: int) -> Path:
        """The requests file of a mix: `distinct`, `zipf` or `base`. Prompts and lengths are the same in all mixes, but
        differ between repeats."""
        names, count = [path.name for path in self.adapters_for(mix)], self.num_requests
        match mix:
            case "base":
                models = [BASE] * count
            case "zipf":
                models = zipf(names, count)
            case _:
                models = in_turn(names, count)
        return self._write(mix, models, repeat)

    def _write(self, mix: str, models: list[str], repeat: int) -> Path:
        path = self.folder / f"{self.name}-{mix}-{repeat}.jsonl"
        return path if path.exists() else write_requests(path, self._draw(models, repeat))

    def _draw(self, models: list[str], repeat: int) -> list[Request]:
        return draw_requests(
            models,
            seed=repeat,
            vocab_size=shapes.shapes()[self.shape].config.vocab_size - 1,
            prompt_mean=self.prompt_mean,
            output_mean=self.output_mean,
            spread=self.spread,
            prefix_tokens=self.prefix_tokens,
        )

"""transformers `generate` and PEFT `generate(adapter_names=…)` on a GPU, with the shapes of `bench_engine_gpu.py`.

Static batches of prompts of equal length, so nothing is padded. The time of a decode step is the average per token
after the first. PEFT computes one adapter after the other, so its outputs are short; the others are short as well, to
leave time for PEFT.

Run: PYTHONPATH=.:kernels:adapters python benchmarks/bench_rivals_gpu.py
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu.llama import DTYPE, llama_8b, lora_config
from gpu.part import argument_parser
from gpu.record import TIME_OVER, Arm, Figure, LeftOut, Record, keep
from gpu.timing import require_cuda
from gpu.work import AdapterKind, Work
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig


@dataclass(frozen=True, slots=True)
class Point:
    batch_size: int
    num_adapters: int
    """0 = transformers without PEFT."""
    output_tokens: int

    @property
    def arm(self) -> Arm:
        return Arm.PEFT if self.num_adapters else Arm.TRANSFORMERS

    @property
    def name(self) -> str:
        return f"{self.arm} B{self.batch_size} D{self.num_adapters}"


POINTS = (
    Point(1, 0, 64),
    Point(16, 0, 64),
    Point(64, 0, 64),
    Point(16, 16, 16),
    Point(64, 64, 8),
    Point(1, 1, 32),
    Point(64, 8, 16),
)
"""Most informative first, but PEFT's after transformers': its adapters stay in the model."""


def measure(
    config: LlamaConfig, points: Sequence[Point], work: Work, device: str, end: float
) -> Iterator[Record | LeftOut]:
    """Starts no point once `end` (of `time.monotonic`) is past."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    model.generation_config.eos_token_id = None
    adapters = Adapters(model, work.kind, device)
    for point in points:
        if time.monotonic() > end:
            yield LeftOut(point.name, TIME_OVER)
            continue
        generate = Generate(adapters.model_with(point.num_adapters), config.vocab_size, work.num_tokens, point, device)
        yield from generate.measure()


class Adapters:
    """The model without adapters, then with as many as requested; adapters cannot be removed again."""

    def __init__(self, model: Any, kind: AdapterKind, device: str) -> None:
        self._model = model
        self._kind = kind
        self._device = device
        self._count = 0

    def model_with(self, count: int) -> Any:
        assert count > 0 or self._count == 0, "the model has adapters already"
        with torch.device(self._device):
            while self._count < count:
                self._add(adapter_name(self._count))
        return self._model

    def _add(self, name: str) -> None:
        """Adds a random adapter in the model's dtype; in float32, PEFT's default, it would be twice as large."""
        config = lora_config(self._kind.lora_ranks[0], self._kind.linears)
        if isinstance(self._model, PeftModel):
            self._model.add_adapter(name, config, autocast_adapter_dtype=False)
        else:
            self._model = get_peft_model(self._model, config, name, autocast_adapter_dtype=False).eval()
        self._count += 1
        with torch.no_grad():
            for parameter_name, parameter in self._model.named_parameters():
                if f".{name}." in parameter_name:
                    parameter.normal_(0, 0.02)


def adapter_name(index: int) -> str:
    return f"adapter-{index}"


class Generate:
    """One static batch."""

    def __init__(self, model: Any, vocab_size: int, prompt_tokens: int, point: Point, device: str) -> None:
        self._model = model
        self._point = point
        self._device = device
        self._input_ids = torch.randint(vocab_size, (point.batch_size, prompt_tokens), device=device)

    def measure(self) -> list[Record]:
        point, prompt_tokens = self._point, self._input_ids.shape[1]
        self._seconds(2)
        first, all_tokens = self._seconds(1), self._seconds(point.output_tokens)
        about = (point.batch_size, point.num_adapters, prompt_tokens, point.output_tokens)
        return [
            Record(point.arm, Figure.DECODE_STEP, *about, (all_tokens - first) * 1e3 / (point.output_tokens - 1)),
            Record(point.arm, Figure.OUTPUT, *about, point.batch_size * point.output_tokens / all_tokens),
        ]

    def _seconds(self, num_tokens: int) -> float:
        """Seconds to generate `num_tokens` tokens for every row."""
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=self._input_ids,
                attention_mask=torch.ones_like(self._input_ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                **self._adapter_names(),
            )
        output[:, -1].tolist()
        seconds = time.perf_counter() - started
        num_new = output.shape[1] - self._input_ids.shape[1]
        assert num_new == num_tokens, f"{num_new} tokens instead of {num_tokens}"
        return seconds

    def _adapter_names(self) -> dict[str, list[str]]:
        """PEFT's `adapter_names` argument; empty for transformers alone, which does not accept it."""
        count = self._point.num_adapters
        rows = range(self._point.batch_size)
        return {"adapter_names": [adapter_name(row % count) for row in rows]} if count else {}


def main() -> None:
    args = argument_parser(__doc__, budget_s=120).parse_args()
    require_cuda()
    end = time.monotonic() + args.budget_s
    keep(measure(llama_8b(), POINTS, Work(), "cuda", end), args.json)


if __name__ == "__main__":
    main()

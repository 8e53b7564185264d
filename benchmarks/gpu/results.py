"""Looks up measurements in one `gpu_suite.py` file."""

from collections.abc import Mapping
from typing import Any

from gpu.record import Arm, Figure, Record
from gpu.work import RANK_16


class NotMeasured(Exception):
    """The run ended before this measurement, or its part failed."""


class Results:
    """Every method raises `NotMeasured` if the file does not have the value."""

    def __init__(self, content: Mapping[str, Any], num_tokens: int) -> None:
        """num_tokens: prompt and output tokens in our decode measurements."""
        parts = {part["name"]: part["content"] for part in content["parts"]}
        self._attention = parts.get("paged_decode", {})
        self._num_tokens = num_tokens
        self.records = [
            Record(**record | {"arm": Arm(record["arm"]), "figure": Figure(record["figure"])})
            for name in ("engine", "rivals")
            for record in parts.get(name, {}).get("results", [])
        ]
        self._values = {
            (each.arm, each.figure, each.batch_size, each.num_adapters, each.prompt_tokens, each.adapters): each.value
            for each in self.records
        }

    def value(
        self,
        arm: Arm,
        figure: Figure,
        batch_size: int,
        num_adapters: int,
        prompt_tokens: int,
        adapters: str = RANK_16.name,
    ) -> float:
        key = (arm, figure, batch_size, num_adapters, prompt_tokens, adapters)
        if key not in self._values:
            raise NotMeasured(key)
        return self._values[key]

    def step_ms(self, arm: Arm, batch_size: int, num_adapters: int, adapters: str = RANK_16.name) -> float:
        return self.value(arm, Figure.DECODE_STEP, batch_size, num_adapters, self._num_tokens, adapters)

    def decode(self, arm: Arm, figure: Figure, batch_size: int, num_adapters: int) -> float:
        return self.value(arm, figure, batch_size, num_adapters, self._num_tokens)

    def attention_share(self, case: str) -> float:
        """Bandwidth of decode attention, as a share of the larger of the bandwidths measured with it."""
        for result in self._attention.get("results", []):
            if (result["name"], result["arm"]) == (case, "ours"):
                ceilings = self._attention["ceilings"]
                bytes_per_s = max(ceilings["copy_bytes_per_s"], ceilings["read_bytes_per_s"])
                return result["size_bytes"] / result["median_us"] * 1e6 / bytes_per_s
        raise NotMeasured(case)

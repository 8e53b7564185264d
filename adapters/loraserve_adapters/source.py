"""Reads a PEFT adapter folder completely: afterwards every tensor is accounted for, finite and of the right shape."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.checks import Checks
from loraserve_adapters.config import AdapterConfig, read_config_bytes
from loraserve_adapters.content import read_content
from loraserve_adapters.digest import adapter_digest
from loraserve_adapters.dtypes import FROM_SAFETENSORS
from loraserve_adapters.judge import JudgedAdapter, judge_config, judge_tensors
from loraserve_adapters.limits import DEFAULT_LIMITS, AdapterLimits
from loraserve_adapters.rules import DEFAULT_RULES, AdapterRules
from loraserve_adapters.safetensors_file import open_weights
from loraserve_adapters.source_module import SourceModule


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """What a listing shows about an adapter."""

    lora_ranks: tuple[int, ...]
    """The different ranks, ascending."""
    target_modules: tuple[str, ...]
    """Last parts of the targeted modules' names, in the layout's order, e.g. ("q_proj", "v_proj"); for experts the
    weight's, e.g. "gate_up_proj"."""
    num_parameters: int
    dtypes: tuple[str, ...]
    """Dtypes of its tensors, e.g. ("bfloat16",)."""
    num_labels: int = 0
    """0 = not a classifier."""


@dataclass(frozen=True, slots=True)
class SourceAdapter:
    """A folder that was read completely and fits the layout. Holds no tensor data and no open file."""

    folder: Path
    digest: str
    judged: JudgedAdapter
    summary: AdapterSummary

    @property
    def config(self) -> AdapterConfig:
        return self.judged.config

    @property
    def modules(self) -> tuple[SourceModule, ...]:
        return self.judged.modules


def read_adapter(folder: Path, layout: BaseLayout, limits: AdapterLimits = DEFAULT_LIMITS) -> SourceAdapter:
    """Verifies the whole folder in one pass over the data, 4 MiB at a time. Raises only `AdapterError`."""
    checks = Checks()
    source = check_adapter(folder, layout, checks, AdapterRules(limits))
    checks.raise_first()
    assert source is not None
    return source


def check_adapter(
    folder: Path, layout: BaseLayout, checks: Checks, rules: AdapterRules = DEFAULT_RULES
) -> SourceAdapter | None:
    """Records every check; None if one failed. Values are only read if config and header are accepted."""
    limits = rules.limits
    data = checks.attempt("config.json", lambda: read_config_bytes(folder, limits))
    config = None if data is None else judge_config(data, checks, rules)
    with ExitStack() as stack:
        weights = checks.attempt("weights.header", lambda: stack.enter_context(open_weights(folder, limits)))
        if config is None:
            return None
        judged = judge_tensors(config, None if weights is None else weights.tensors, layout, checks, limits)
        if judged is None or weights is None:
            return None
        hashed = checks.attempt("weights.header", lambda: read_content(judged, weights, layout, checks))
    if hashed is None or checks.has_failed:
        return None
    return SourceAdapter(folder, adapter_digest(config, hashed), judged, summarise(judged))


def summarise(adapter: JudgedAdapter) -> AdapterSummary:
    entries, head = adapter.entries, adapter.head
    return AdapterSummary(
        lora_ranks=tuple(sorted({module.target.lora_rank for module in adapter.modules})),
        target_modules=tuple(dict.fromkeys(_last_part(module.target.module) for module in adapter.modules)),
        num_parameters=sum(entry.num_elements for entry in entries),
        dtypes=tuple(sorted({FROM_SAFETENSORS[entry.dtype] for entry in entries})),
        num_labels=0 if head is None else head.shape[0],
    )


def _last_part(module: BaseModule) -> str:
    """For a router's weight, the router's name."""
    return module.name.removesuffix(".weight").rpartition(".")[2]

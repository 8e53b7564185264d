"""What an app is made of."""

from dataclasses import dataclass

from loraserve_adapters.limits import DEFAULT_LIMITS, Limits

from loraserve.serving.adapter_service import AdapterService
from loraserve.serving.engine_client import EngineClient
from loraserve.serving.generation import GenerationService
from loraserve.serving.lifecycle import Lifecycle
from loraserve.serving.metrics import ServingMetrics
from loraserve.serving.registry import AdapterRegistry, InProcessRegistry
from loraserve.serving.settings import ServingSettings
from loraserve.serving.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Runtime:
    """Typed, and injected into every handler."""

    engine: EngineClient
    registry: AdapterRegistry
    adapters: AdapterService
    tokenizer: TextTokenizer
    generation: GenerationService
    metrics: ServingMetrics
    lifecycle: Lifecycle
    settings: ServingSettings


def build_runtime(
    engine: EngineClient,
    settings: ServingSettings,
    registry: AdapterRegistry | None = None,
    adapter_limits: Limits = DEFAULT_LIMITS,
) -> Runtime:
    """`engine` must be ready. To be called on the event loop that serves."""
    registry = registry if registry is not None else InProcessRegistry()
    lifecycle = Lifecycle()
    tokenizer = TextTokenizer(engine.model)
    base_name = settings.served_model_names[0]
    metrics = ServingMetrics(engine, registry, lifecycle, base_name=base_name, compat_metrics=settings.compat_metrics)
    adapters = AdapterService(
        engine,
        registry,
        base_names=settings.served_model_names,
        packed_dir=settings.packed_dir,
        on_removed=metrics.forget_adapter,
        unload_timeout_s=settings.unload_timeout_s,
        limits=adapter_limits,
    )
    generation = GenerationService(engine, tokenizer, registry, metrics, lifecycle, settings.limits)
    return Runtime(engine, registry, adapters, tokenizer, generation, metrics, lifecycle, settings)

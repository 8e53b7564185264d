"""The engine-side components of an app."""

from dataclasses import dataclass

from loraserve.serving.bound_adapter import AdapterNames
from loraserve.serving.engine_client import EngineClient
from loraserve.serving.generation import GenerationService
from loraserve.serving.lifecycle import Lifecycle
from loraserve.serving.settings import ServingSettings
from loraserve.serving.telemetry.metrics import ServingMetrics
from loraserve.serving.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Runtime:
    """Typed, and injected into every handler."""

    engine: EngineClient
    tokenizer: TextTokenizer
    generation: GenerationService
    metrics: ServingMetrics
    lifecycle: Lifecycle
    settings: ServingSettings


def build_runtime(engine: EngineClient, settings: ServingSettings, adapters: AdapterNames) -> Runtime:
    """`engine` must be ready. Call it on the serving event loop."""
    lifecycle = Lifecycle()
    tokenizer = TextTokenizer(engine.model, settings.adapter_chat_templates)
    base_name = settings.served_model_names[0]
    metrics = ServingMetrics(engine, adapters, lifecycle, base_name=base_name, compat_metrics=settings.compat_metrics)
    generation = GenerationService(engine, tokenizer, metrics, lifecycle)
    return Runtime(engine, tokenizer, generation, metrics, lifecycle, settings)

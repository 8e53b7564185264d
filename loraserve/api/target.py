"""Which model a request means. What is not known is an error, never the base model."""

from dataclasses import dataclass

from loraserve.serving.engine_errors import model_not_found
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.serving.registry import ResolvedAdapter
from loraserve.serving.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    """As requested; responses echo it."""
    adapter: ResolvedAdapter | None
    """None = the base model."""


def resolve_target(runtime: Runtime, model: str | None, path_adapter: str | None = None) -> Target:
    """path_adapter: of a per-adapter base URL, where `model` may be left out or must mean the same adapter."""
    if path_adapter is not None:
        return _resolve_in_path(runtime, model, path_adapter)
    if not model:
        message = "'model' is missing. Name the base model or an adapter; GET /v1/models lists them."
        raise ServingError(ErrorCode.MISSING_PARAMETER, message, param="model")
    return _resolve(runtime, model)


def resolve_optional(runtime: Runtime, model: str | None) -> None:
    """For routes whose answer does not depend on the model: absent is fine, unknown is not."""
    if model is not None:
        resolve_target(runtime, model)


def _resolve_in_path(runtime: Runtime, model: str | None, path_adapter: str) -> Target:
    adapter = runtime.registry.resolve(path_adapter)
    if adapter is None:
        raise model_not_found(path_adapter)
    if model is None:
        return Target(adapter.name, adapter)
    if _resolve(runtime, model).adapter != adapter:
        raise invalid_value("model", f"is {model!r}, but the URL names the adapter '{path_adapter}'.")
    return Target(model, adapter)


def _resolve(runtime: Runtime, model: str) -> Target:
    base_names = runtime.settings.served_model_names
    if model in base_names:
        return Target(model, None)
    base, _, suffix = model.rpartition(":")
    adapter = runtime.registry.resolve(model)
    if adapter is None and base in base_names:
        adapter = runtime.registry.resolve(suffix)
    if adapter is None:
        raise model_not_found(model[:256])
    return Target(model, adapter)

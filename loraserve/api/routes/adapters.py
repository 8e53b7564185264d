"""vLLM's POST /v1/load_lora_adapter and /v1/unload_lora_adapter: its status codes, its texts."""

from pathlib import Path

import msgspec
from litestar import MediaType, Request, post
from litestar.di import NamedDependency

from loraserve.api.app_context import AppContext
from loraserve.api.decoding import decode_body
from loraserve.api.openapi import ERROR_RESPONSES, json_body
from loraserve.api.ranges import unsupported
from loraserve.api.schemas.adapters import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value

LOAD_DECODER = msgspec.json.Decoder(LoadLoraAdapterRequest, strict=True)
UNLOAD_DECODER = msgspec.json.Decoder(UnloadLoraAdapterRequest, strict=True)


@post(
    "/v1/load_lora_adapter",
    status_code=200,
    media_type=MediaType.TEXT,
    operation_class=json_body(LoadLoraAdapterRequest),
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def load_lora_adapter(request: Request, context: NamedDependency[AppContext]) -> str:
    """Validate an adapter folder on this server, load it and make it visible."""
    asked = await decode_body(request, LOAD_DECODER)
    _check_allowed(context)
    _check_given("lora_name", asked.lora_name)
    _check_given("lora_path", asked.lora_path)
    if asked.is_3d_lora_weight:
        raise unsupported("is_3d_lora_weight", "is true, which is not supported.")
    await context.runtime.adapters.add(asked.lora_name, Path(asked.lora_path), replace=asked.load_inplace)
    return f"Success: LoRA adapter '{asked.lora_name}' added successfully."


@post(
    "/v1/unload_lora_adapter",
    status_code=200,
    media_type=MediaType.TEXT,
    operation_class=json_body(UnloadLoraAdapterRequest),
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def unload_lora_adapter(request: Request, context: NamedDependency[AppContext]) -> str:
    """Make an adapter invisible at once, and forget it when what runs with it has finished."""
    asked = await decode_body(request, UNLOAD_DECODER)
    _check_allowed(context)
    _check_given("lora_name", asked.lora_name)
    await context.runtime.adapters.remove(asked.lora_name)
    return f"Success: LoRA adapter '{asked.lora_name}' removed successfully."


def _check_allowed(context: AppContext) -> None:
    if not context.runtime.settings.allow_runtime_lora:
        message = "Loading and unloading adapters at run time is switched off on this server."
        raise ServingError(ErrorCode.FORBIDDEN, message)


def _check_given(param: str, value: str) -> None:
    if not value:
        raise invalid_value(param, "is empty.")
    if "\0" in value:
        raise invalid_value(param, "contains a null character.")

"""vLLM's endpoints for loading and unloading adapters."""

import msgspec


class LoadLoraAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Replace an adapter of the same name."""
    is_3d_lora_weight: bool | None = None
    """Only false."""


class UnloadLoraAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None
    """Accepted; names are what we go by."""

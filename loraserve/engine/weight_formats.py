"""Formats in which weights are computed: `--quantization`, and quantized checkpoints whose weights stay as stored."""

import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.quantization import ROUNDINGS, Quantization
from transformers import PreTrainedConfig

from loraserve.engine.config import EngineConfig
from loraserve.engine.device.accelerator import Accelerator
from loraserve.engine.errors import EngineStartError
from loraserve.engine.memory_plan import GIB
from loraserve.models import loader
from loraserve.models.causal_model import CausalModel
from loraserve.models.quantized_checkpoint import MXFP4, quantization_method
from loraserve.models.stored_weights import StoredWeights, packed_bytes, placeholder

QUANTIZED_NOTE = "without our C kernels, which support bfloat16 and float32, each step dequantizes the weights again"


def choose_quantization(config: EngineConfig, accelerator: Accelerator | None) -> Quantization | None:
    """The value of `--quantization`; accelerator: None on a CPU. Raises `EngineStartError`."""
    if config.quantization == "none":
        return None
    if config.quantization not in ROUNDINGS:
        choices = ", ".join(ROUNDINGS)
        raise EngineStartError(f"--quantization {config.quantization} is not supported: choose one of none, {choices}")
    if accelerator is not None:
        raise EngineStartError(
            f"--quantization {config.quantization} is supported on CPUs only, but the device is {accelerator.device}: "
            "choose none or --device cpu"
        )
    return Quantization(config.quantization)


def keeps_stored(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, backend: Backend, quantization: Quantization | None
) -> bool:
    """Whether weights stored in a four-bit format that we support stay so. Without our C kernels each step dequantizes
    them to full precision, so they then stay so only if quantization was requested."""
    is_fit = device.type == "cpu" and (backend.packs(dtype) or quantization is not None)
    return is_fit and config.load_format != "dummy"


def majority_format(model_config: PreTrainedConfig, dtype: torch.dtype, stored: StoredWeights) -> Quantization | None:
    """The format of stored linears outside experts if these are more than half of the model's weights, else None."""
    linears = [weight for weight in stored.values() if len(weight.shape) == 2]
    num_bytes = sum(placeholder(weight, dtype).nbytes for weight in linears)
    are_most = num_bytes > loader.num_weight_bytes(model_config, dtype) / 2
    return linears[0].quantization if are_most else None


def check_memory(
    model: str, model_config: PreTrainedConfig, dtype: torch.dtype, stored: StoredWeights, available_bytes: int
) -> None:
    """Raises `EngineStartError` if `available_bytes` are too few for the weights that are dequantized to full precision
    and those that stay in four bits. Other weights are mapped from their files."""
    method = quantization_method(model_config)
    if method is None:
        return
    needed = sum(packed_bytes(weight) for weight in stored.values())
    if method != MXFP4 or not stored:
        needed += loader.num_weight_bytes(model_config, dtype)
        needed -= sum(placeholder(weight, dtype).nbytes for weight in stored.values())
    if needed > available_bytes:
        what = f"dequantized while loading: its weights in {dtype_name(dtype)}"
        if stored:
            what = "keeps its four-bit weights as stored: its weights, or those of its experts,"
        raise EngineStartError(
            f"{model} is quantized with {method} and {what} take {needed / GIB:.1f} GiB, but "
            f"only {available_bytes / GIB:.1f} GiB of memory are free"
        )


def checkpoint_notes(config: EngineConfig, model_config: PreTrainedConfig, model: CausalModel) -> list[str]:
    """For the operator: what became of the weights of a quantized checkpoint; at most one note."""
    if (method := quantization_method(model_config)) is None:
        return []
    form = f"dequantized to {dtype_name(model.dtype)}"
    if config.quantization != "none":
        form = f"{form}, then quantized to {config.quantization}"
    if not model.stored:
        return [f"{method} checkpoint: its weights are {form}"]
    if method == MXFP4 or not model.has_other_linears:
        kept = "experts" if method == MXFP4 else "linears"
        return [f"{method} checkpoint: its {kept} stay in four bits, as stored"]
    num_linears = sum(len(weight.names_in_file) for weight in model.stored.values())
    kept = f"{num_linears} of its linears stay in four bits, as stored"
    return [f"{method} checkpoint: {kept}; the others are {form}"]


def quantization_notes(quantization: Quantization | None, model: CausalModel, backend: Backend) -> list[str]:
    """For the operator: why `--quantization` makes steps slow, if it does; at most one note."""
    if quantization is None or backend.packs(model.dtype):
        return []
    return [f"--quantization {quantization}: {QUANTIZED_NOTE}"]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Translates engine errors into errors for clients."""

import logging

from loraserve.engine.request import EngineErrorCode, Grammar, SequenceOutput
from loraserve.serving.bound_adapter import BoundAdapter
from loraserve.serving.errors import ErrorCode, ServingError

logger = logging.getLogger(__name__)


def engine_dead() -> ServingError:
    return ServingError(ErrorCode.ENGINE_DEAD, "The engine is not running. The server's log says why.", retry_after_s=5)


def model_not_found(name: str) -> ServingError:
    message = f"The model '{name}' does not exist. GET /v1/models lists the base model and its adapters."
    return ServingError(ErrorCode.MODEL_NOT_FOUND, message, param="model")


def request_failed(
    output: SequenceOutput, adapter: BoundAdapter | None, grammar: Grammar | None = None
) -> ServingError:
    """For an output with finish_reason "error" of a request for `adapter`, constrained by `grammar`."""
    message = output.error or "The engine could not run the request."
    match output.error_code:
        case EngineErrorCode.INVALID_REQUEST:
            return ServingError(ErrorCode.INVALID_REQUEST, f"The engine refused the request: {message}.")
        case EngineErrorCode.ADAPTER_NOT_LOADED if adapter is not None:
            return model_not_found(adapter.name)
        case EngineErrorCode.ADAPTER_UNREADABLE if adapter is not None:
            logger.error("adapter %s (%s): %s", adapter.name, adapter.digest, message)
            text = f"The adapter '{adapter.name}' could not be read; the server's log says why. "
            text += "The next request repacks its files: try again."
            return ServingError(ErrorCode.ADAPTER_UNREADABLE, text)
        case EngineErrorCode.GRAMMAR:
            text = f"The requested schema or grammar cannot be enforced: {message}."
            return ServingError(ErrorCode.INVALID_VALUE, text, param=None if grammar is None else grammar.param)
        case EngineErrorCode.NOT_FINITE:
            return ServingError(ErrorCode.NOT_FINITE, f"{message[0].upper()}{message[1:]}.")
        case _:
            return ServingError(ErrorCode.ENGINE_ERROR, message)

"""Converts a LoRAX request into a completion request, which is then checked like any other."""

from loraserve.api.http.ranges import check_range, unsupported
from loraserve.api.schemas.completions import CompletionRequest
from loraserve.api.schemas.lorax import LoraxParameters, LoraxRequest
from loraserve.api.schemas.unsupported import refuse_unsupported
from loraserve.serving.errors import invalid_value

MAX_SEED = 2**63 - 1
FOUND_HERE = "local"
"""The only adapter source."""


def completion_of(body: LoraxRequest) -> tuple[CompletionRequest, LoraxParameters]:
    """Raises `ServingError` naming an unsupported field."""
    parameters = body.parameters or LoraxParameters()
    refuse_unsupported(parameters, "parameters.")
    _check(parameters)
    if not body.inputs:
        raise invalid_value("inputs", "is empty.")
    samples = parameters.do_sample or any(
        value is not None for value in (parameters.temperature, parameters.top_k, parameters.top_p)
    )
    request = CompletionRequest(
        prompt=body.inputs,
        model=parameters.adapter_id,
        max_tokens=parameters.max_new_tokens,
        # LoRAX's defaults, not those of the model's generation_config.
        temperature=(1.0 if parameters.temperature is None else parameters.temperature) if samples else 0.0,
        top_k=parameters.top_k or 0,
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        min_p=0.0,
        repetition_penalty=1.0 if parameters.repetition_penalty is None else parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty,
        presence_penalty=parameters.presence_penalty,
        seed=parameters.seed,
        stop=parameters.stop,
        include_stop_str_in_output=True,
        ignore_eos=parameters.ignore_eos_token,
        response_format=parameters.response_format,
    )
    return request, parameters


def _check(parameters: LoraxParameters) -> None:
    if parameters.best_of not in (None, 1):
        raise unsupported("parameters.best_of", f"is {parameters.best_of}; only 1 is supported.")
    if parameters.adapter_source not in (None, FOUND_HERE):
        message = "is not supported: adapters are uploaded to this server and found by name. Leave it out."
        raise unsupported("parameters.adapter_source", message)
    if parameters.api_token is not None:
        raise unsupported("parameters.api_token", "is not supported: send the key in the Authorization header.")
    if parameters.adapter_id == "":
        raise invalid_value("parameters.adapter_id", "is empty; leave it out for the base model.")
    if parameters.max_new_tokens is not None and parameters.max_new_tokens < 1:
        raise invalid_value("parameters.max_new_tokens", f"is {parameters.max_new_tokens}; it must be at least 1.")
    if parameters.seed is not None:
        check_range("parameters.seed", parameters.seed, 0, MAX_SEED)

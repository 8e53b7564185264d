"""What a request must be for the engine to serve it."""

import math

from loraserve.engine.errors import EngineRequestError
from loraserve.engine.request import EngineRequest, Grammar


def check_request(request: EngineRequest, max_model_len: int, max_num_seqs: int, vocab_size: int) -> None:
    """Raises `EngineRequestError`.

    The API has checked all this; the engine trusts nobody with an index into a tensor.
    """
    params, num_prompt = request.sampling, len(request.prompt_token_ids)
    if not 1 <= num_prompt < max_model_len:
        raise EngineRequestError(f"the prompt has {num_prompt} tokens; 1 to {max_model_len - 1} are possible")
    if params.max_tokens < 1:
        raise EngineRequestError(f"max_tokens is {params.max_tokens}; at least 1 is needed")
    if not 1 <= params.n <= max_num_seqs:
        raise EngineRequestError(f"n is {params.n}; 1 to {max_num_seqs} (--max-num-seqs) are possible")
    if len(request.predicted_token_ids) > max_model_len:
        num_predicted = len(request.predicted_token_ids)
        raise EngineRequestError(f"the prediction has {num_predicted} tokens; up to {max_model_len} are possible")
    ids = [
        *request.prompt_token_ids,
        *request.predicted_token_ids,
        *params.stop_token_ids,
        *params.allowed_token_ids,
        *params.logit_bias,
        *_marks_of_reasoning(params.grammar),
    ]
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise EngineRequestError(f"token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})")
    if not 0 < request.tenant_weight < math.inf:
        raise EngineRequestError(f"the tenant's weight is {request.tenant_weight}; it must be above 0")


def _marks_of_reasoning(grammar: Grammar | None) -> list[int]:
    reasoning = None if grammar is None else grammar.reasoning
    ids = () if reasoning is None else (reasoning.opening_id, reasoning.closing_id)
    return [token_id for token_id in ids if token_id is not None]

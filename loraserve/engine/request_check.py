"""Checks that the engine can serve a request."""

import math
from itertools import chain

from loraserve.engine.errors import EngineRequestError
from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import EngineRequest, PoolingParams, ReasoningLimit, SamplingParams


def check_request(request: EngineRequest, model: ModelDescription) -> None:
    """Raises `EngineRequestError`.

    The API has already checked all this, but the engine trusts no caller with an index into a tensor.
    """
    params, num_prompt = request.sampling, len(request.prompt_token_ids)
    max_model_len, max_num_seqs, vocab_size = model.max_model_len, model.max_num_seqs, model.vocab_size
    longest = max_model_len - 1 if request.pooling is None else max_model_len
    if not 1 <= num_prompt <= longest:
        raise EngineRequestError(f"the prompt has {num_prompt} tokens; 1 to {longest} are allowed")
    if request.pooling is not None:
        _check_pooling(request, request.pooling, model.hidden_size)
    if params.max_tokens < 1:
        raise EngineRequestError(f"max_tokens is {params.max_tokens}; it must be at least 1")
    if not 1 <= params.n <= max_num_seqs:
        raise EngineRequestError(f"n is {params.n}; 1 to {max_num_seqs} (--max-num-seqs) are allowed")
    if len(request.predicted_token_ids) > max_model_len:
        num_predicted = len(request.predicted_token_ids)
        raise EngineRequestError(f"the prediction has {num_predicted} tokens; up to {max_model_len} are allowed")
    ids = [
        *request.prompt_token_ids,
        *request.predicted_token_ids,
        *params.stop_token_ids,
        *params.allowed_token_ids,
        *params.logit_bias,
        *_marks_of_reasoning(params),
    ]
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise EngineRequestError(f"token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})")
    if params.reasoning_limit is not None:
        _check_limit(params.reasoning_limit, params)
    if not 0 < request.tenant_weight < math.inf:
        raise EngineRequestError(f"the tenant's weight is {request.tenant_weight}; it must be above 0 and finite")


def _check_pooling(request: EngineRequest, params: PoolingParams, hidden_size: int) -> None:
    if params.dimensions is not None and not 1 <= params.dimensions <= hidden_size:
        raise EngineRequestError(f"dimensions is {params.dimensions}; 1 to {hidden_size} are allowed")
    if params.labels is not None and (params.dimensions is not None or params.normalize):
        raise EngineRequestError("a classification request can set neither dimensions nor normalize")
    if request.sampling.n != 1 or request.sampling.grammar is not None:
        raise EngineRequestError("a pooling request can have neither several choices nor a grammar")


def _check_limit(limit: ReasoningLimit, params: SamplingParams) -> None:
    closing_id = limit.tokens.closing_id
    if limit.max_tokens < 0:
        raise EngineRequestError(f"the limit of the reasoning is {limit.max_tokens} tokens; it must be at least 0")
    if params.grammar is not None and params.grammar.reasoning != limit.tokens:
        raise EngineRequestError("the limit and the grammar do not agree on what is reasoning")
    if params.allowed_token_ids and closing_id not in params.allowed_token_ids:
        raise EngineRequestError(f"the reasoning has a limit, but token {closing_id}, which ends it, is not allowed")
    if params.min_tokens > 0 and closing_id in params.stop_token_ids:
        raise EngineRequestError(f"the reasoning has a limit, but min_tokens forbids token {closing_id}, which ends it")


def _marks_of_reasoning(params: SamplingParams) -> list[int]:
    of_grammar = None if params.grammar is None else params.grammar.reasoning
    of_limit = None if params.reasoning_limit is None else params.reasoning_limit.tokens
    marks = [(tokens.opening_id, tokens.closing_id) for tokens in (of_grammar, of_limit) if tokens is not None]
    return [token_id for token_id in chain.from_iterable(marks) if token_id is not None]

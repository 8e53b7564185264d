import math
from dataclasses import replace
from typing import Any

import pytest

from loraserve.engine.errors import EngineRequestError
from loraserve.engine.request import (
    EngineRequest,
    Grammar,
    GrammarKind,
    Pooling,
    PoolingParams,
    ReasoningLimit,
    ReasoningTokens,
    SamplingParams,
)
from loraserve.engine.request_check import check_request
from tests.support.fake_engine_client import make_model

REQUEST = EngineRequest("r", [1, 29], SamplingParams(max_tokens=1, n=2, stop_token_ids=(29,), logit_bias={0: 1.0}))
TO_POOL = EngineRequest("p", [1, 2, 29], SamplingParams(max_tokens=1), pooling=PoolingParams(Pooling.MEAN, 8))


def held_behind(reasoning: ReasoningTokens) -> EngineRequest:
    grammar = Grammar(GrammarKind.REGEX, "a", reasoning)
    return replace(REQUEST, sampling=replace(REQUEST.sampling, grammar=grammar))


def limited(tokens: ReasoningTokens, max_tokens: int = 0, grammar: Grammar | None = None) -> EngineRequest:
    limit = ReasoningLimit(tokens, max_tokens)
    return replace(REQUEST, sampling=replace(REQUEST.sampling, grammar=grammar, reasoning_limit=limit))


def forbidding(closing_id: int, **params: Any) -> EngineRequest:
    request = limited(ReasoningTokens(None, closing_id))
    return replace(request, sampling=replace(request.sampling, **params))


def check(request: EngineRequest) -> None:
    check_request(request, make_model(max_model_len=3, max_num_seqs=2, vocab_size=30, hidden_size=8))


def test_requests_just_within_the_limits_are_accepted() -> None:
    check(REQUEST)
    check(held_behind(ReasoningTokens(0, 29)))
    check(held_behind(ReasoningTokens(None, 29)))
    check(limited(ReasoningTokens(0, 29)))
    check(limited(ReasoningTokens(0, 29), 1, Grammar(GrammarKind.REGEX, "a", ReasoningTokens(0, 29))))
    check(forbidding(1, allowed_token_ids=(1, 2)))
    check(forbidding(1, stop_token_ids=(1,)))
    check(forbidding(1, min_tokens=1))
    check(TO_POOL)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (replace(REQUEST, prompt_token_ids=[]), "the prompt has 0 tokens; 1 to 2 are allowed"),
        (replace(REQUEST, prompt_token_ids=[1, 2, 3]), "the prompt has 3 tokens; 1 to 2 are allowed"),
        (replace(REQUEST, predicted_token_ids=[1, 2, 3, 4]), "the prediction has 4 tokens; up to 3 are allowed"),
        (replace(REQUEST, predicted_token_ids=[1, 30]), r"token id 30 is outside the vocabulary \(0 to 29\)"),
        (replace(REQUEST, prompt_token_ids=[1, 30]), r"token id 30 is outside the vocabulary \(0 to 29\)"),
        (replace(REQUEST, sampling=replace(REQUEST.sampling, n=3)), r"n is 3; 1 to 2 \(--max-num-seqs\)"),
        (replace(REQUEST, sampling=replace(REQUEST.sampling, max_tokens=0)), "max_tokens is 0; it must be at least 1"),
        (replace(REQUEST, sampling=replace(REQUEST.sampling, allowed_token_ids=(-1,))), "token id -1 is outside"),
        (held_behind(ReasoningTokens(None, 30)), "token id 30 is outside"),
        (held_behind(ReasoningTokens(-1, 29)), "token id -1 is outside"),
        (limited(ReasoningTokens(None, 30)), "token id 30 is outside"),
        (limited(ReasoningTokens(30, 1)), "token id 30 is outside"),
        (limited(ReasoningTokens(0, 1), -1), "the limit of the reasoning is -1 tokens; it must be at least 0"),
        (forbidding(1, allowed_token_ids=(2, 3)), "token 1, which ends it, is not allowed"),
        (forbidding(1, stop_token_ids=(1,), min_tokens=1), "min_tokens forbids token 1, which ends it"),
        (limited(ReasoningTokens(0, 1), grammar=Grammar(GrammarKind.REGEX, "a")), "do not agree on what is reasoning"),
        (replace(TO_POOL, prompt_token_ids=[1] * 4), "the prompt has 4 tokens; 1 to 3 are allowed"),
        (replace(TO_POOL, pooling=PoolingParams(Pooling.LAST, 9)), "dimensions is 9; 1 to 8 are allowed"),
        (replace(TO_POOL, pooling=PoolingParams(Pooling.LAST, 0)), "dimensions is 0; 1 to 8 are allowed"),
        (
            replace(TO_POOL, sampling=SamplingParams(max_tokens=1, n=2)),
            "can have neither several choices nor a grammar",
        ),
        (replace(REQUEST, tenant_weight=0.0), "the tenant's weight is 0.0; it must be above 0 and finite"),
        (replace(REQUEST, tenant_weight=math.inf), "the tenant's weight is inf"),
        (replace(REQUEST, tenant_weight=math.nan), "the tenant's weight is nan"),
    ],
)
def test_requests_outside_the_limits_are_refused_with_the_value_and_the_limit(
    asked: EngineRequest, message: str
) -> None:
    with pytest.raises(EngineRequestError, match=message):
        check(asked)

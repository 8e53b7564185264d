import math

import pytest

from loraserve.api.inference.sampling import CheckedSampling, SamplingChecker, check_context, prompt_sampling
from loraserve.api.schemas.completions import CompletionRequest
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.settings import RequestLimits
from tests.support.fake_engine_client import make_model

MODEL = make_model()
VOCAB = MODEL.vocab_size
CHECKER = SamplingChecker(MODEL, RequestLimits())


def check(checker: SamplingChecker = CHECKER, **fields: object) -> CheckedSampling:
    request = CompletionRequest(prompt="x", **fields)  # pyright: ignore[reportArgumentType]
    return checker.check(request, max_tokens=request.max_tokens, logprobs=None, prompt_logprobs=None)


@pytest.mark.parametrize(
    ("param", "good", "bad"),
    [
        ("temperature", [0, 0.7, 2], [-0.01, 2.01, math.nan, math.inf, -math.inf]),
        ("top_p", [0.01, 1], [0, -1, 1.01, math.nan]),
        ("top_k", [-1, 0, 1, 10**6], [-2, 2**63, 10**400]),
        ("min_p", [0, 1], [-0.1, 1.1, math.nan]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.01, 1, 10], [0, -1, 1e-300, 10.1, math.inf]),
        ("n", [1, 8], [0, -1, 9, 2**70]),
        ("seed", [-(2**63), -1, 0, 2**63 - 1], [-(2**63) - 1, 2**63]),
        ("min_tokens", [0, 3], [-1, 2**40]),
        (
            "logit_bias",
            [{}, {"0": -100, str(VOCAB - 1): 100}],
            [{str(VOCAB): 1}, {"-1": 1}, {"x": 1}, {"1": 101}, {"²": 1}],
        ),
        ("stop_token_ids", [[], [0, VOCAB - 1]], [[VOCAB], [-1], [2**63], [0] * 1025]),
        ("allowed_token_ids", [[0], [VOCAB - 1]], [[], [VOCAB], [-1]]),
        ("stop", ["x", list("abcdefghijklmnop"), "x" * 256, []], ["", ["a", ""], list("abcdefghijklmnopq"), "x" * 257]),
        ("cache_salt", ["s"], ["", "s" * 257]),
        ("prompt_logprobs", [0, 20], [-1, 21]),
        ("priority", [0, None, -(2**31), 2**31 - 1], [-(2**31) - 1, 2**31]),
        ("store", [False], [True]),
        ("service_tier", ["auto", "default", "flex", "priority"], ["scale", ""]),
        ("request_id", ["abc-1"], ["", "a b", "x" * 129, "a\n"]),
        ("logit_bias", [{str(i): 0 for i in range(300)}], [{str(i): 0 for i in range(301)}]),
    ],
)
def test_values_out_of_range_are_refused_by_name(param: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        check(**{param: value})
    for value in bad:
        with pytest.raises(ServingError) as caught:
            check(**{param: value})
        assert caught.value.param == param
        assert param in caught.value.message
        assert len(caught.value.message) < 300


def test_errors_give_the_value_and_the_limit() -> None:
    with pytest.raises(ServingError, match=r"'temperature' is 2.5; it must be between 0 and 2\."):
        check(temperature=2.5)
    with pytest.raises(ServingError, match=rf"token id {VOCAB}; ids must be between 0 and {VOCAB - 1}\."):
        check(stop_token_ids=[3, VOCAB])


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    check(min_tokens=5, max_tokens=5)
    with pytest.raises(ServingError, match="min_tokens"):
        check(min_tokens=6, max_tokens=5)
    with pytest.raises(ServingError, match="min_tokens"):
        prompt_sampling(check(min_tokens=6), 5)


def test_prompt_logprobs_and_stream_options_need_the_right_mode() -> None:
    with pytest.raises(ServingError, match="prompt_logprobs"):
        check(prompt_logprobs=1, stream=True)
    with pytest.raises(ServingError, match="stream_options"):
        check(stream_options=object())


def test_defaults_are_openais_if_the_model_has_none() -> None:
    params = check().params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (1, 1, 0, 0, 1)


def test_the_models_generation_config_fills_in_omitted_fields() -> None:
    given = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
    checker = SamplingChecker(make_model(default_sampling=given), RequestLimits())
    params = check(checker).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (
        0.6,
        20,
        0.9,
        0.05,
        1.1,
    )
    assert check(checker, temperature=0.0, top_k=-1).params.temperature == 0
    assert check(checker, temperature=0.0, top_k=-1).params.top_k == 0


def test_default_max_tokens_is_the_rest_of_the_context_unless_the_model_says_less() -> None:
    assert CHECKER.default_max_tokens(100) == 100
    checker = SamplingChecker(make_model(default_sampling={"max_new_tokens": 30}), RequestLimits())
    assert (checker.default_max_tokens(100), checker.default_max_tokens(20)) == (30, 20)


def test_the_models_max_new_tokens_is_a_default_not_a_limit() -> None:
    """As in vLLM, which caps requests only if the operator names a separate generation config."""
    checker = SamplingChecker(make_model(default_sampling={"max_new_tokens": 30}), RequestLimits())
    assert check(checker, max_tokens=100).max_tokens == 100


@pytest.mark.parametrize(("given", "used"), [(0.0, 0.0), (1e-6, 0.0), (1e-4, 0.01), (0.5, 0.5)])
def test_tiny_temperatures_become_zero_or_the_minimum(given: float, used: float) -> None:
    assert check(temperature=given).params.temperature == used


def test_seeds_are_reproducible_unless_absent_or_minus_one() -> None:
    assert prompt_sampling(check(seed=7), 5).seed == 7
    same = [prompt_sampling(check(seed=-5), 5).seed for _ in range(2)]
    assert same[0] == same[1]
    assert 0 <= same[0] < 2**62
    for seed in (None, -1):
        checked = check(seed=seed)
        assert prompt_sampling(checked, 5).seed != prompt_sampling(checked, 5).seed


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "param", "shown"),
    [
        (500, 13, "max_tokens", ("500", "13", "512", "lower max_tokens")),
        (512, 13, "prompt", ("512", "no room")),
        (512, None, "prompt", ("512", "no room")),
        (600, 0, "prompt", ("600", "512", "no room")),
    ],
)
def test_requests_that_exceed_the_context_are_refused(
    num_prompt_tokens: int, max_tokens: int | None, param: str, shown: tuple[str, ...]
) -> None:
    with pytest.raises(ServingError) as caught:
        check_context(num_prompt_tokens, max_tokens, 512, "prompt", "max_tokens")
    assert (caught.value.code, caught.value.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, param)
    assert all(text in caught.value.message for text in shown)
    for recognized in ("This model's maximum context length is", "prompt is too long"):
        assert recognized in caught.value.message


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(500, 12), (511, None), (511, 0)])
def test_requests_that_fit_the_context_are_accepted(num_prompt_tokens: int, max_tokens: int | None) -> None:
    check_context(num_prompt_tokens, max_tokens, 512, "prompt", "max_tokens")

import pytest

from loraserve.engine.request import EngineRequest, FinishReason, Pooling, PoolingParams, SamplingParams
from loraserve.engine.scheduling.endings import Endings
from loraserve.engine.scheduling.sequence import RequestState, Sequence

EOS, STOP, OTHER = 7, 3, 1
MAX_MODEL_LEN = 10


@pytest.fixture
def endings() -> Endings:
    return Endings((EOS,), MAX_MODEL_LEN)


def sequence(num_prompt: int = 2, output: tuple[int, ...] = (OTHER,), **params: object) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 100, "stop_token_ids": (STOP,)} | params)  # type: ignore[arg-type]
    prompt = [OTHER] * num_prompt
    return Sequence(RequestState(EngineRequest("r", prompt, sampling), 0.0, b""), 0, [*prompt, *output], num_prompt)


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ((OTHER,), {}, (None, None)),
        ((OTHER, STOP), {}, (FinishReason.STOP, STOP)),
        ((OTHER, EOS), {}, (FinishReason.STOP, None)),
        ((OTHER, EOS), {"ignore_eos": True}, (None, None)),
        ((OTHER, EOS), {"ignore_eos": True, "stop_token_ids": (EOS,)}, (FinishReason.STOP, EOS)),
        ((OTHER, STOP), {"min_tokens": 3}, (None, None)),
        ((OTHER, EOS), {"min_tokens": 3}, (None, None)),
        ((OTHER, OTHER), {"max_tokens": 2}, (FinishReason.LENGTH, None)),
        ((OTHER, STOP), {"max_tokens": 2}, (FinishReason.STOP, STOP)),
        ((OTHER, STOP), {"max_tokens": 2, "min_tokens": 3}, (FinishReason.LENGTH, None)),
        ((OTHER,) * 8, {}, (FinishReason.LENGTH, None)),
        ((OTHER,) * 7, {}, (None, None)),
    ],
)
def test_the_newest_token_decides_whether_and_why_a_sequence_ends(
    endings: Endings, output: tuple[int, ...], params: dict[str, object], expected: tuple[object, object]
) -> None:
    assert endings.reason(sequence(output=output, **params), output[-1]) == expected


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 100])
@pytest.mark.parametrize("num_prompt", [1, 4, 8])
def test_an_ending_by_length_is_known_one_token_in_advance(endings: Endings, num_prompt: int, max_tokens: int) -> None:
    for num_output in range(min(max_tokens, MAX_MODEL_LEN - num_prompt)):
        known = sequence(num_prompt, (OTHER,) * num_output, max_tokens=max_tokens)
        is_certain = endings.ends_with_next(known)
        known.token_ids.append(OTHER)
        assert is_certain == (endings.reason(known, OTHER)[0] is FinishReason.LENGTH)


def test_an_ending_by_stop_token_is_not_known_in_advance(endings: Endings) -> None:
    assert not endings.ends_with_next(sequence(output=(OTHER, OTHER)))


def test_a_pooled_sequence_ends_with_its_prompt_whatever_its_sampling_params(endings: Endings) -> None:
    request = EngineRequest("r", [OTHER], SamplingParams(100), pooling=PoolingParams(Pooling.LAST))
    pooled = Sequence(RequestState(request, 0.0, b""), 0, [OTHER], 1)
    assert endings.num_left(pooled) == 0
    assert endings.ends_with_next(pooled)

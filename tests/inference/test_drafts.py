"""Speculative decoding on a tiny model: answers equal those without it."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from loraserve.engine.request import EngineRequest, SamplingParams
from tests.support.engines import make_engine, run
from tests.support.tiny_models import save_tiny_model

VARIANTS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"seed": 7, "logprobs": 0},
    {"seed": 8, "top_p": 0.8, "n": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"seed": 9, "presence_penalty": 0.5, "logit_bias": {7: 3.0}, "min_tokens": 10},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("params", VARIANTS)
def test_answers_with_drafts_equal_those_without(model: Path, params: dict[str, object], dtype: str) -> None:
    rng = random.Random(1)
    sampling = SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | params)
    request = EngineRequest("r", [rng.randrange(256) for _ in range(50)], sampling)
    plain = make_engine(model, dtype=dtype, num_speculative_tokens=0)
    expected = run(plain, [request])
    tokens = expected["r", 0].token_ids
    predicted = [*tokens[:17], 5, 6, *tokens[18:]]
    engine = make_engine(model, dtype=dtype)
    answers = run(engine, [replace(request, predicted_token_ids=predicted)])
    assert answers == expected
    stats = engine.stats()
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 20
    if sampling.n == 1:
        assert stats.step < plain.stats().step - 15


@pytest.mark.parametrize("overrides", [{"dtype": "float16"}, {"backend": "reference"}])
def test_drafting_is_off_if_extra_rows_are_not_free(model: Path, overrides: dict[str, object]) -> None:
    assert make_engine(model, **overrides).describe().num_speculative_tokens == 0


def test_drafting_is_off_for_a_mixture_of_experts(tmp_path: Path) -> None:
    """Each row may read different experts."""
    save_tiny_model("mixtral", tmp_path)
    assert make_engine(tmp_path).describe().num_speculative_tokens == 0


def test_repetitive_text_takes_fewer_steps(model: Path) -> None:
    """A logit bias makes the model repeat one token."""
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, logit_bias={9: 100.0})
    request = EngineRequest("r", [1, 2, 3], sampling)
    engine = make_engine(model)
    (answer,) = run(engine, [request]).values()
    assert answer.token_ids == [9] * 60
    assert engine.stats().step < 30

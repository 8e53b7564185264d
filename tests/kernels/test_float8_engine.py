"""The engine with a float8 KV cache on Triton's kernels, against the same cache in plain torch.

Without a GPU, the CPU takes its place and Triton's kernels are interpreted.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from loraserve.engine import startup
from loraserve.engine.request import EngineRequest, TokenLogprob
from tests.support.engines import add_adapters, greedy, make_engine, run
from tests.support.host_accelerator import HostAccelerator
from tests.support.tiny_adapters import adapter_configs, save_adapters
from tests.support.tiny_models import save_model, shallow_model

pytestmark = [
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
    pytest.mark.usefixtures("unchecked_models"),
    # Attention leaves a graph's padded rows undefined; numpy, which interprets, warns about operations on them.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),
]

NUM_TOKENS = 3
VOCAB_SIZE = 259
ADAPTER = "patterns64"
PROMPT_LENGTHS = {None: 21, ADAPTER: 7}
SETTINGS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32}


@pytest.fixture
def gpu(triton_device: str, kv_float8: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of engines with a float8 cache: a GPU or its stand-in."""
    if triton_device == "cpu":
        monkeypatch.setattr(startup, "accelerator_of", lambda _: HostAccelerator())
    return triton_device


def logprobs_of(folder: Path, device: str, **overrides: object) -> dict[str, torch.Tensor]:
    """Log-probabilities at each request's greedy tokens: [tokens, VOCAB_SIZE].

    Runs two requests at once, the longer prompt in chunks, then that prompt again, from the prefix cache.
    """
    engine = make_engine(folder / "model", device=device, **SETTINGS | overrides)
    expected_dtype = "float8_e4m3fn" if overrides.get("kv_cache_dtype") == "fp8" else "float32"
    assert engine.describe().kv_cache_dtype == expected_dtype
    digests = {None: None, **add_adapters(engine, {ADAPTER: folder / "adapters" / ADAPTER}, folder / "packed")}
    rng = random.Random(0)
    prompts = {name: rng.choices(range(256), k=length) for name, length in PROMPT_LENGTHS.items()}

    def request(request_id: str, name: str | None, num_tokens: int) -> EngineRequest:
        return greedy(request_id, prompts[name], num_tokens, digests[name], logprobs=VOCAB_SIZE)

    answers = run(engine, [request("base", None, NUM_TOKENS), request("adapter", ADAPTER, NUM_TOKENS)])
    again = run(engine, [request("again", None, 1)])
    assert again["again", 0].num_cached_tokens == 16
    return {request_id: _rows(answer.logprobs) for (request_id, _), answer in (answers | again).items()}


def _rows(logprobs: Sequence[TokenLogprob]) -> torch.Tensor:
    rows = torch.empty(len(logprobs), VOCAB_SIZE)
    for row, token in zip(rows, logprobs, strict=True):
        ids, values = zip(*token.top, strict=True)
        row[list(ids)] = torch.tensor(values)
    return rows


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], num_tokens: int) -> float:
    """The largest difference over the first tokens of all requests."""
    assert found.keys() == expected.keys() == {"base", "adapter", "again"}
    return max(float((found[name][:num_tokens] - expected[name][:num_tokens]).abs().max()) for name in found)


@pytest.mark.parametrize(("family", "enforce_eager"), [("llama", False), ("gemma2", True)])
def test_triton_matches_plain_torch_with_the_same_float8_cache(
    gpu: str, tmp_path: Path, family: str, enforce_eager: bool
) -> None:
    """llama replays its decode steps; gemma2 has a sliding window and a softcap.

    A key between two e4m3 values may be rounded to either after additions in another order: hence 1e-3.
    """
    model = shallow_model(family)
    save_model(model, tmp_path / "model")
    save_adapters(model, tmp_path / "adapters", {ADAPTER: adapter_configs(model)[ADAPTER]})
    options = {"kv_cache_dtype": "fp8", "enforce_eager": enforce_eager}
    found = logprobs_of(tmp_path, gpu, backend="triton", **options)
    expected = logprobs_of(tmp_path, gpu, backend="reference", **options)
    exact = logprobs_of(tmp_path, gpu, backend="reference")
    assert [rows.argmax(1).tolist() for rows in found.values()] == [
        rows.argmax(1).tolist() for rows in expected.values()
    ]
    assert difference(found, expected, NUM_TOKENS) < 1e-3
    assert difference(exact, expected, 1) > 20e-3, "an engine that ignores the option would pass"

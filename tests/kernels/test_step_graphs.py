"""Steps replayed over the builder's padded tensors: the engine returns the same tokens as without graphs.

On a GPU, replays are of CUDA graphs; on a CPU, a replay repeats the captured launches in Triton's interpreter.
"""

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import LoraConfig

from loraserve.engine import startup
from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, Pooling
from loraserve.engine.steps.graphs import StepGraphs
from tests.support.engines import Answers, add_adapters, collect, greedy, make_engine, run, to_pool
from tests.support.host_accelerator import HostAccelerator
from tests.support.tiny_adapters import (
    ALL_LINEAR,
    adapter_configs,
    dora_configs,
    embedding_configs,
    save_adapters,
    table_configs,
)
from tests.support.tiny_models import save_model, shallow_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("unchecked_models"),
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
    # Attention leaves a graph's padded rows undefined; numpy, which interprets, warns about operations on them.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),
]

NUM_TOKENS = 3
SETTINGS = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "max_model_len": 32,
    "backend": "triton",
    "device": "cuda" if torch.cuda.is_available() else "cpu",
}
ADAPTERS = ("rank1", "patterns64", "embedding2")


def save_all(folder: Path, architecture: str) -> None:
    model = shallow_model(architecture, seed=2)  # with this seed, answers with a bias have several different tokens
    save_model(model, folder / "model")
    configs = adapter_configs(model) | embedding_configs()
    save_adapters(model, folder / "adapters", {name: configs[name] for name in ADAPTERS})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_all(folder, "llama")
    return folder


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> HostAccelerator | None:
    """The stand-in for a GPU that the engine runs on; None if there is a GPU."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return None
    accelerator = HostAccelerator()
    monkeypatch.setattr(startup, "accelerator_of", lambda _: accelerator)
    return accelerator


class Started(NamedTuple):
    engine: Engine
    digests: dict[str | None, str | None]
    """Of the adapters, by name; None for the base model."""


def start(folder: Path, **overrides: object) -> Started:
    engine = make_engine(folder / "model", **SETTINGS | overrides)
    adapters = {name: folder / "adapters" / name for name in ADAPTERS}
    return Started(engine, {None: None, **add_adapters(engine, adapters, folder / "packed")})


@pytest.fixture(scope="module")
def plain(folder: Path) -> Started:
    return start(folder, backend="auto", device="cpu")


@pytest.fixture(scope="module")
def graphs(folder: Path, unchecked_models: None) -> Started:
    """An engine with graphs and room for all adapters."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not torch.cuda.is_available():
            monkeypatch.setattr(startup, "accelerator_of", lambda _: HostAccelerator())
        return start(folder)


def requests(digests: dict[str | None, str | None], names: list[str | None], turn: str) -> list[EngineRequest]:
    rng = random.Random(turn)
    lengths = [rng.randrange(1, 12) for _ in names]
    return [
        greedy(f"{turn}-{i}", rng.choices(range(256), k=length), NUM_TOKENS, digests[name], logprobs=(2, None)[i % 2])
        for i, (name, length) in enumerate(zip(names, lengths, strict=True))
    ]


def run_turns(engine: Engine, digests: dict[str | None, str | None]) -> Answers:
    """The base model alone, then adapters that arrive one by one: more of them, and of larger ranks, than at first."""
    answers = run(engine, requests(digests, [None], "base"))
    for request in requests(digests, ["rank1", "patterns64", None, "embedding2"], "mixed"):
        engine.add_request(request)
        collect(answers, engine.step())
    while engine.has_work():
        collect(answers, engine.step())
    return answers


def assert_equal_answers(found: Answers, expected: Answers) -> None:
    assert found.keys() == expected.keys()
    for key, answer in expected.items():
        assert found[key].token_ids == answer.token_ids, key
        for ours, theirs in zip(found[key].logprobs, answer.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4), key


def test_replayed_steps_give_the_tokens_of_a_plain_engine(
    folder: Path, plain: Started, accelerator: HostAccelerator | None
) -> None:
    expected = run_turns(plain.engine, plain.digests)
    largest = max(path.stat().st_size for path in (folder / "packed").iterdir())
    graphs, digests = start(folder, adapter_memory_bytes=largest)  # adapters take turns in it
    if accelerator is not None:
        assert accelerator.num_recordings == 2 * len((1, 2, 3, 16))
    assert_equal_answers(run_turns(graphs, digests), expected)
    assert graphs.stats().num_adapter_evictions > 0
    if accelerator is not None:
        assert accelerator.num_replays == graphs._counts.num_steps, "steps with prompts, too"


def test_replayed_steps_with_experts_give_the_tokens_of_a_plain_engine(
    tmp_path: Path, accelerator: HostAccelerator | None
) -> None:
    """The host does not know which expert a token goes to; rank1 and patterns64 adapt the experts too.

    Each pair of a token and an expert in a graph, padding included, is a segment: hence the smaller steps.
    """
    save_all(tmp_path, "mixtral")
    plain = start(tmp_path, backend="auto", device="cpu")
    graphs = start(tmp_path, max_num_batched_tokens=8)
    assert_equal_answers(run_turns(*graphs), run_turns(*plain))
    if accelerator is not None:
        assert accelerator.num_replays == graphs.engine._counts.num_steps


def run_ahead(engine: Engine, requests: list[EngineRequest]) -> Answers:
    """Requires that at least one step is queued before the tokens of the previous one are known."""
    answers: Answers = {}
    num_ahead = 0
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        collect(answers, engine.step())
        num_ahead += engine._in_flight is not None
    assert num_ahead > 0
    return answers


def test_replays_queued_before_tokens_are_known_give_the_tokens_of_a_plain_engine(
    plain: Started, graphs: Started
) -> None:
    """Tokens go from one replay to the next on the device; when a sequence ends, the others use a smaller graph."""

    def asked(digests: dict[str | None, str | None]) -> list[EngineRequest]:
        return [
            greedy(f"{name}", list(range(1, 3 + i)), NUM_TOKENS + i, digests[name])
            for i, name in enumerate([None, "rank1", "embedding2"])
        ]

    assert_equal_answers(run_ahead(graphs.engine, asked(graphs.digests)), run(plain.engine, asked(plain.digests)))


def test_prompts_are_pooled_beside_replays_and_before_earlier_tokens_are_known(plain: Started, graphs: Started) -> None:
    """A step with a pooled prompt is launched directly; the next is queued after it, or it is queued after a replay."""
    answers: list[Answers] = []
    for engine, digests in (plain, graphs):
        engine.add_request(greedy("goes on", [5, 3], 2 * NUM_TOKENS, digests["rank1"]))
        answers.append({})
        collect(answers[-1], engine.step())
        engine.add_request(to_pool("long", range(20), digests["embedding2"], pooling=Pooling.MEAN))
        engine.add_request(to_pool("short", [7, 1, 2], digests["rank1"]))
        while engine.has_work():
            collect(answers[-1], engine.step())
    expected, found = answers
    assert_equal_answers(found, expected)
    for name in ("long", "short"):
        ours, theirs = (np.frombuffer(each[name, 0].pooled or b"", np.float32) for each in answers)
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_an_activated_adapter_applies_to_the_rows_from_its_invocation_on(
    tmp_path: Path, plain: Started, graphs: Started
) -> None:
    """In a replay beside a plain adapter and the base model; the first step has rows of both kinds."""
    configs = {
        name: LoraConfig(
            r=rank, lora_alpha=16, target_modules=ALL_LINEAR, alora_invocation_tokens=[250, 9], task_type="CAUSAL_LM"
        )
        for name, rank in (("activated", 5), ("other", 3))
    }
    adapters = save_adapters(shallow_model("llama", seed=2), tmp_path / "adapters", configs)
    prompts = {"activated": [1, 2, 3, 250, 9], "other": [4, 250, 9, 7], "rank1": [250, 9], None: [250, 9, 11]}
    answers: list[Answers] = []
    for engine, digests in (plain, graphs):
        known = digests | add_adapters(engine, adapters, tmp_path / "packed")
        asked = [greedy(f"invoked {name}", prompt, NUM_TOKENS, known[name]) for name, prompt in prompts.items()]
        answers.append(run(engine, asked))
    expected, found = answers
    assert_equal_answers(found, expected)


def test_dora_factors_are_computed_before_a_step_uses_them(tmp_path: Path, plain: Started, graphs: Started) -> None:
    """In a replay beside a plain adapter and the base model; adapters are loaded while steps run."""
    model = shallow_model("llama", seed=2)
    configs = {name: dora_configs(model)[name] for name in ("dora1", "dora_head9")}
    adapters = save_adapters(model, tmp_path / "adapters", configs)
    answers: list[Answers] = []
    for engine, digests in (plain, graphs):
        known = digests | add_adapters(engine, adapters, tmp_path / "packed")
        answers.append(run(engine, requests(known, ["dora1", "rank1", "dora_head9", None, "dora1"], "dora")))
    expected, found = answers
    assert_equal_answers(found, expected)


def test_steps_with_own_tables_are_computed_without_a_graph(
    tmp_path: Path, plain: Started, graphs: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a plain adapter and the base model; adapters are loaded while steps run. The steps of the others are
    replays before and after."""
    saved = save_adapters(shallow_model("llama", seed=2), tmp_path / "adapters", table_configs(is_tied=False))
    adapters = {name: saved[name] for name in ("own_both", "tokens_and_head")}
    replayed: list[bool] = []
    try_replay = StepGraphs.try_replay

    def replay(*args: Any) -> torch.Tensor | None:
        logits = try_replay(*args)
        replayed.append(logits is not None)
        return logits

    monkeypatch.setattr(StepGraphs, "try_replay", replay)
    answers: list[Answers] = []
    names = ["own_both", "rank1", "tokens_and_head", None, "own_both"]
    for engine, digests in (plain, graphs):
        known = digests | add_adapters(engine, adapters, tmp_path / "packed")
        answers.append(run(engine, requests(known, ["rank1", None], "before")))
        answers[-1] |= run(engine, requests(known, names, "own"))
        answers[-1] |= run(engine, requests(known, ["rank1", None], "after"))
    expected, found = answers
    assert_equal_answers(found, expected)
    assert replayed[0]
    assert replayed[-1]
    assert not all(replayed)


def test_edited_rows_are_chosen_and_counted_before_earlier_tokens_are_known(plain: Started, graphs: Started) -> None:
    """Penalties move each row through tokens that a bias made likely; log-probabilities arrive with the tokens."""
    likely = {40 + i: 50.0 - i / 2 for i in range(6)}
    edits: list[dict[str, Any]] = [
        {"logit_bias": likely, "frequency_penalty": 2.0, "logprobs": 2},
        {"logit_bias": likely, "repetition_penalty": 1.2, "presence_penalty": 0.4, "min_tokens": 4},
        {"logit_bias": likely, "frequency_penalty": 1.5, "allowed_token_ids": tuple(range(41, 60)), "logprobs": 0},
    ]

    def asked(digests: dict[str | None, str | None]) -> list[EngineRequest]:
        return [
            greedy(f"edited {name}", [20 + i, 3, 8][: i + 1], NUM_TOKENS + 1, digests[name], **params)
            for i, (name, params) in enumerate(zip([None, "rank1", "patterns64"], edits, strict=True))
        ]

    expected = run(plain.engine, asked(plain.digests))
    assert all(len(set(answer.token_ids)) > 2 for answer in expected.values())
    assert_equal_answers(run_ahead(graphs.engine, asked(graphs.digests)), expected)


def test_eager_steps_give_the_tokens_of_a_plain_engine(
    folder: Path, plain: Started, accelerator: HostAccelerator | None
) -> None:
    expected = run(plain.engine, requests(plain.digests, [None, "rank1"], "eager"))
    eager, digests = start(folder, enforce_eager=True)
    assert_equal_answers(run(eager, requests(digests, [None, "rank1"], "eager")), expected)
    if accelerator is not None:
        assert accelerator.num_recordings == 0

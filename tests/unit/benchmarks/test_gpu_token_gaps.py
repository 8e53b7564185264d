from types import SimpleNamespace
from typing import cast

import pytest
from gpu import token_gaps
from gpu.record import Figure
from gpu.token_gaps import gaps_ms, while_adapters_load
from gpu.work import AdapterKind, Work

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams, SequenceOutput

DECODE_S, LOAD_S = 0.004, 0.003
DIGESTS = ("a", "b", "c", "d", "e")
WORK = Work(
    kind=AdapterKind("r16", (16,), num_adapters=4),
    cold_repeats=2,
    loading_prompts=(16,),
    loading_batch_size=3,
    loading_steps=4,
)
ARRIVING = EngineRequest("arriving", [1], SamplingParams(max_tokens=1), "a")


class FakeEngine:
    """Has room for `WORK.max_adapters` adapters. Steps that load one take longer; a first token takes two."""

    def __init__(self) -> None:
        self.now = 0.0
        self.running: dict[str, int] = {}
        """Steps until the first token, by request."""
        self.resident: list[str] = []
        """Least recently used first."""
        self.num_loading = 0
        self.arrived: list[tuple[str, bool]] = []
        """(digest, whether it was already loaded) of each request that arrived during the decodes."""

    def perf_counter(self) -> float:
        return self.now

    def describe(self) -> SimpleNamespace:
        return SimpleNamespace(max_model_len=1000, vocab_size=10)

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(resident_adapters=list(self.resident), num_running=len(self.running))

    def add_request(self, request: EngineRequest) -> None:
        digest = request.adapter_digest
        assert digest is not None
        if request.request_id == "arriving":
            self.arrived.append((digest, digest in self.resident))
            self.num_loading += digest not in self.resident
        self.resident = [*(each for each in self.resident if each != digest), digest][-WORK.max_adapters :]
        self.running[request.request_id] = 2

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> list[SequenceOutput]:
        self.now += DECODE_S + LOAD_S * self.num_loading
        self.num_loading = 0
        self.running = {name: max(left - 1, 0) for name, left in self.running.items()}
        outputs = [SequenceOutput(name, 0, [1]) for name, left in self.running.items() if left == 0]
        self.running = {name: left for name, left in self.running.items() if name != "arriving" or left}
        return outputs

    def abort(self, request_id: str) -> None:
        del self.running[request_id]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(token_gaps, "time", engine)
    return engine


def test_gaps_are_measured_from_the_arrival_to_its_first_token_and_for_the_given_steps(engine: FakeEngine) -> None:
    assert gaps_ms(cast(Engine, engine), ARRIVING, 1) == pytest.approx([7.0, 4.0])
    assert gaps_ms(cast(Engine, engine), ARRIVING, 3) == pytest.approx([4.0] * 3)


def test_each_adapter_arrives_once_unloaded_and_once_loaded(engine: FakeEngine) -> None:
    loading, loaded = while_adapters_load(cast(Engine, engine), WORK, DIGESTS)
    assert engine.arrived == [("a", True), ("c", False), ("c", True), ("d", False), ("d", True)]
    assert (loading.figure, loaded.figure) == (Figure.GAP_LOADING, Figure.GAP_LOADED)
    assert (loading.batch_size, loading.num_adapters, loading.prompt_tokens, loading.repeats) == (3, 2, 16, 8)
    assert loading.value == pytest.approx(7.0)
    assert loaded.value == pytest.approx(4.0)
    assert engine.running == {}

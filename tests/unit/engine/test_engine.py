import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraserve_adapters.errors import AdapterError

from loraserve.engine.adapters.files import AdapterFiles
from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.engine import NOT_FINITE_MESSAGE, Engine
from loraserve.engine.errors import EngineRequestError, EngineStepError
from loraserve.engine.request import (
    BegunPrompt,
    EngineErrorCode,
    EngineRequest,
    EngineStats,
    FinishReason,
    Pooling,
    PoolingParams,
    SamplingParams,
)
from loraserve.engine.scheduling.fair_queue import FairQueue
from loraserve.engine.scheduling.sequence import RequestState
from tests.support.hash_model import (
    BASE,
    VOCAB_SIZE,
    Choice,
    HashRunner,
    expected_choice,
    make_hash_engine,
    run_to_idle,
)
from tests.support.packed_adapters import TinyAdapter, damage, make_adapter_memory

ADAPTERS = [TinyAdapter(value, num_units) for value, num_units in enumerate((1, 2, 3), start=1)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[TinyAdapter, Path]:
    folder = tmp_path_factory.mktemp("packed")
    return {adapter: adapter.write(folder) for adapter in ADAPTERS}


@pytest.fixture
def memory() -> AdapterMemory:
    return make_adapter_memory(4)


@pytest.fixture
def parts(
    monkeypatch: pytest.MonkeyPatch, memory: AdapterMemory, paths: dict[TinyAdapter, Path]
) -> tuple[Engine, HashRunner]:
    engine, runner = make_hash_engine(monkeypatch, adapters=memory)
    for adapter, path in paths.items():
        engine.load_adapter(adapter.digest, str(path))
    return engine, runner


@pytest.fixture
def engine(parts: tuple[Engine, HashRunner]) -> Engine:
    return parts[0]


@pytest.fixture
def runner(parts: tuple[Engine, HashRunner]) -> HashRunner:
    return parts[1]


def ask(
    name: str = "r",
    prompt: list[int] | None = None,
    adapter: TinyAdapter | None = None,
    params: SamplingParams = GREEDY,
    salt: str = "",
    tenant: str = "t",
    priority: int = 0,
) -> EngineRequest:
    digest = None if adapter is None else adapter.digest
    return EngineRequest(name, prompt or [1, 2, 3, 4, 5], params, digest, salt, tenant, priority=priority)


def answer(request: EngineRequest, adapter: TinyAdapter | None = None, index: int = 0) -> Choice:
    return expected_choice(request, index, BASE if adapter is None else adapter.value)


@contextmanager
def garbage_left_alone() -> Iterator[None]:
    """Collects existing garbage first, then disables the collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---- idle time


def test_idle_time_touches_memory_after_the_blocks_used_so_far(engine: Engine, runner: HashRunner) -> None:
    assert not engine.use_idle_time()
    assert runner.num_used_blocks == 0
    engine.add_request(ask(prompt=list(range(1, 13))))
    run_to_idle(engine)
    runner.can_touch_ahead = True
    assert engine.use_idle_time()
    assert runner.num_used_blocks == 4


# ---- tokens


def test_a_mixed_batch_gives_each_adapter_and_the_base_model_its_own_tokens(engine: Engine) -> None:
    asked = dict(zip("abcd", [None, *ADAPTERS], strict=True))
    for name, adapter in asked.items():
        engine.add_request(ask(name, adapter=adapter))
    choices = run_to_idle(engine)
    answers = {(name, 0): answer(ask(name), adapter) for name, adapter in asked.items()}
    assert choices == answers
    assert len({tuple(choice.token_ids) for choice in choices.values()}) == 4


def test_adapters_and_the_base_model_do_not_share_cached_blocks(engine: Engine) -> None:
    prompt = list(range(1, 13))
    for i, adapter in enumerate([None, ADAPTERS[0], ADAPTERS[1], ADAPTERS[0], None]):
        engine.add_request(ask(f"{i}", prompt, adapter))
        assert run_to_idle(engine) == {(f"{i}", 0): answer(ask(f"{i}", prompt), adapter)}
    assert engine.stats().prefix_cache_hits == 2 * 8


def test_requests_with_different_salts_do_not_share_cached_blocks(engine: Engine) -> None:
    prompt = list(range(1, 13))
    for i, salt in enumerate(["", "one", "two", "one"]):
        engine.add_request(ask(f"{i}", prompt, salt=salt))
        run_to_idle(engine)
    assert engine.stats().prefix_cache_hits == 8


def test_choices_continue_one_prompt_with_their_own_seeds(engine: Engine) -> None:
    request = ask(params=SamplingParams(max_tokens=9, n=3, seed=5, ignore_eos=True), adapter=ADAPTERS[0])
    engine.add_request(request)
    choices = run_to_idle(engine)
    assert choices == {("r", index): answer(request, ADAPTERS[0], index) for index in range(3)}
    assert len({tuple(choice.token_ids) for choice in choices.values()}) == 3


@pytest.mark.parametrize(
    ("params", "num_drawn_within"),
    [
        ({}, 4),  # two of the six forward passes do not draw
        ({"n": 3}, 9),  # nor does the first, in which three tokens are drawn from one row
        ({"prompt_logprobs": 0}, 4),
        ({"logprobs": 0}, 4),
        ({"min_tokens": 4}, 2),
        ({"presence_penalty": 0.5}, 0),
    ],
    ids=str,
)
def test_tokens_are_drawn_within_the_forward_pass_unless_their_logits_are_edited(
    engine: Engine, runner: HashRunner, params: dict[str, float], num_drawn_within: int
) -> None:
    prompt = list(range(1, 13))  # takes two steps: the first token is drawn in the second
    drawn = ask("drawn", prompt, params=replace(GREEDY, max_tokens=6, temperature=1.0, top_k=5, seed=3, **params))
    greedy = ask("greedy", params=replace(GREEDY, max_tokens=6))
    engine.add_request(drawn)
    engine.add_request(greedy)
    choices = run_to_idle(engine)
    assert choices.pop(("greedy", 0)) == answer(greedy)
    assert choices == {("drawn", index): answer(drawn, index=index) for index in range(drawn.sampling.n)}
    assert runner.num_drawn_within == num_drawn_within


def test_prompt_logprobs_and_logprobs_survive_chunks_and_choices(engine: Engine) -> None:
    params = SamplingParams(max_tokens=3, n=2, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    request = ask(prompt=list(range(1, 24)), params=params)
    engine.add_request(request)
    choices = run_to_idle(engine)
    assert choices == {("r", index): answer(request, index=index) for index in range(2)}
    assert len(choices["r", 0].prompt_logprobs or []) == 23


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 47])
def test_prompts_of_lengths_around_the_block_size_are_answered(engine: Engine, length: int) -> None:
    request = ask(prompt=[i % 20 + 1 for i in range(length)])
    engine.add_request(request)
    choices = run_to_idle(engine)
    assert choices == {("r", 0): answer(request)}
    assert len(choices["r", 0].token_ids) == min(4, 48 - length)


def test_stop_tokens_and_length_end_a_sequence_with_their_reason(engine: Engine) -> None:
    tokens = answer(ask()).token_ids
    first = tokens.index(tokens[2])
    for name, params in (
        ("stop", replace(GREEDY, stop_token_ids=(tokens[2],))),
        ("min", replace(GREEDY, stop_token_ids=(tokens[0],), min_tokens=2)),
        ("length", GREEDY),
    ):
        engine.add_request(ask(name, params=params))
    choices = run_to_idle(engine)
    assert (choices["stop", 0].finish_reason, choices["stop", 0].stop_token_id) == (FinishReason.STOP, tokens[2])
    assert choices["stop", 0].token_ids == tokens[: first + 1]
    assert len(choices["min", 0].token_ids) >= 2
    assert choices["length", 0].finish_reason is FinishReason.LENGTH


# ---- preemption

workload = st.lists(
    st.builds(
        lambda prompt, adapter, tenant, params: (prompt, adapter, tenant, params),
        st.integers(1, 20).map(lambda length: [i % 7 + 1 for i in range(length)]),
        st.sampled_from([None, *ADAPTERS]),
        st.sampled_from("ab"),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 16),
            n=st.integers(1, 3),
            temperature=st.sampled_from([0.0, 1.0]),
            presence_penalty=st.sampled_from([0.0, 0.7]),
            repetition_penalty=st.sampled_from([1.0, 1.2]),
            seed=st.integers(0, 9),
            stop_token_ids=st.sampled_from([(), (3, 4)]),
            ignore_eos=st.booleans(),
            logprobs=st.sampled_from([None, 2]),
            prompt_logprobs=st.sampled_from([None, 0]),
        ),
    ),
    min_size=3,
    max_size=8,
)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(workload=workload)
def test_a_tiny_pool_gives_the_same_tokens_as_a_large_one(
    paths: dict[TinyAdapter, Path], workload: list[tuple[list[int], TinyAdapter | None, str, SamplingParams]]
) -> None:
    results = []
    # (blocks, tokens per step, arena units, prefix caching)
    for num_blocks, budget, num_units, caching in ((200, 512, 16, True), (12, 7, 3, True), (12, 10, 6, False)):
        with pytest.MonkeyPatch.context() as monkeypatch:
            engine, _ = make_hash_engine(
                monkeypatch,
                adapters=make_adapter_memory(num_units),
                num_blocks=num_blocks,
                max_num_batched_tokens=budget,
                max_num_seqs=24,
                enable_prefix_caching=caching,
            )
        for adapter, path in paths.items():
            engine.load_adapter(adapter.digest, str(path))
        for i, (prompt, adapter, tenant, params) in enumerate(workload):
            engine.add_request(ask(f"{i}", prompt, adapter, params, tenant=tenant))
        results.append(run_to_idle(engine))
    assert results[0] == results[1] == results[2]
    for i, (prompt, adapter, _, params) in enumerate(workload):
        request = ask(f"{i}", prompt, adapter, params)
        for index in range(params.n):
            assert results[0][f"{i}", index] == answer(request, adapter, index)


def test_a_tiny_pool_preempts_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_hash_engine(monkeypatch, num_blocks=12, max_num_batched_tokens=7)
    for i in range(6):
        engine.add_request(ask(f"{i}", [i + 1] * 12, params=replace(GREEDY, max_tokens=16)))
    run_to_idle(engine)
    assert engine.stats().num_preemptions > 3


def test_a_request_that_gave_way_to_a_more_urgent_one_gets_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_hash_engine(monkeypatch, num_blocks=24, max_num_seqs=2)
    params = replace(GREEDY, max_tokens=20, temperature=1.0, presence_penalty=0.7, seed=3, logprobs=1)
    later = [ask(f"later {i}", [i + 1] * 9, params=params, priority=1) for i in range(2)]
    for request in later:
        engine.add_request(request)
    outputs = [output for _ in range(8) for output in engine.step()]
    engine.add_request(ask("urgent", [7] * 9))
    while engine.has_work():
        outputs += engine.step()
    assert engine.stats().num_preemptions == 1
    assert next(output.request_id for output in outputs if output.finish_reason) == "urgent"
    for request in later:
        choice = Choice()
        for output in outputs:
            if output.request_id == request.request_id:
                choice.take(output)
        assert choice == answer(request)


# ---- non-finite values


def test_only_the_request_with_non_finite_values_fails(engine: Engine, runner: HashRunner) -> None:
    prompt = list(range(1, 10))
    engine.add_request(ask("victim", [*prompt, 20], params=replace(GREEDY, n=2)))
    engine.step()
    engine.step()
    engine.add_request(ask("neighbour", [*prompt, 21]))
    runner.poison_next = 0
    choices = {("victim", index): Choice() for index in (0, 1)} | run_to_idle(engine)
    assert runner.poisoned == {"victim"}
    assert {choices["victim", index].error for index in (0, 1)} == {NOT_FINITE_MESSAGE}
    assert {choices["victim", index].error_code for index in (0, 1)} == {EngineErrorCode.NOT_FINITE}
    assert choices["neighbour", 0] == answer(ask(prompt=[*prompt, 21]))


def test_blocks_with_non_finite_values_are_wiped_and_never_reused_from_the_cache(
    engine: Engine, runner: HashRunner
) -> None:
    prompt = list(range(1, 17))
    runner.poison_next = 0
    engine.add_request(ask("bad", prompt))
    engine.step()
    assert runner.non_finite_blocks()
    choices = run_to_idle(engine)
    assert choices["bad", 0].error == NOT_FINITE_MESSAGE
    assert runner.non_finite_blocks() == set()
    assert engine.stats().num_cached_blocks == 0
    engine.add_request(ask("again", prompt))
    assert run_to_idle(engine) == {("again", 0): answer(ask(prompt=prompt))}
    assert engine.stats().prefix_cache_hits == 0


def test_blocks_shared_with_another_request_are_not_wiped(engine: Engine, runner: HashRunner) -> None:
    prompt = list(range(1, 13))
    long = replace(GREEDY, max_tokens=12)
    engine.add_request(ask("first", prompt, params=long))
    engine.step()
    engine.step()
    engine.add_request(ask("second", prompt, params=long))
    engine.step()
    assert engine.stats().prefix_cache_hits == 8
    runner.poison_next = 1
    choices = run_to_idle(engine)
    failed = runner.poisoned.pop()
    kept = ({"first", "second"} - {failed}).pop()
    assert choices[failed, 0].error == NOT_FINITE_MESSAGE
    expected = answer(ask(prompt=prompt, params=long))
    assert choices[kept, 0].token_ids == expected.token_ids[-len(choices[kept, 0].token_ids) :]


# ---- aborts


def test_aborting_a_chunked_prompt_ends_every_choice_and_frees_all_blocks(
    engine: Engine, memory: AdapterMemory
) -> None:
    engine.add_request(ask("r", list(range(1, 25)), ADAPTERS[0], replace(GREEDY, n=3)))
    engine.step()
    outputs = engine.abort("r")
    assert [(output.index, output.finish_reason) for output in outputs] == [(i, FinishReason.ABORT) for i in range(3)]
    assert engine.abort("r") == []
    assert not engine.has_work()
    assert engine.stats().num_free_blocks == 12
    memory.check_invariants({})


def test_the_id_of_an_aborted_request_can_be_used_again(engine: Engine) -> None:
    engine.add_request(ask("r"))
    engine.step()
    engine.abort("r")
    engine.add_request(ask("r"))
    assert run_to_idle(engine) == {("r", 0): answer(ask())}


def test_aborting_a_request_ends_only_its_unfinished_choices(engine: Engine) -> None:
    request = ask(params=SamplingParams(max_tokens=30, n=3, seed=1, ignore_eos=True, stop_token_ids=(3, 4, 5, 6)))
    engine.add_request(request)
    ended: dict[int, FinishReason] = {}
    while len(ended) == 0:
        ended |= {o.index: o.finish_reason for o in engine.step() if o.finish_reason is not None}
    assert len(ended) < 3, "choose another seed"
    assert {output.index for output in engine.abort("r")} == {0, 1, 2} - set(ended)
    engine.check_invariants()
    assert not engine.has_work()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("aborted", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 2}])
def test_an_aborted_choice_ends_alone_whether_or_not_it_was_forked(
    engine: Engine, memory: AdapterMemory, aborted: set[int], num_steps: int
) -> None:
    """The prompt of 14 takes two steps of the budget of 10, then the choices are forked."""
    request = ask("r", list(range(1, 15)), ADAPTERS[0], replace(GREEDY, n=3, temperature=1.0, max_tokens=8))
    engine.add_request(request)
    before = [output for _ in range(num_steps) for output in engine.step()]
    for index in sorted(aborted):
        outputs = engine.abort("r", index)
        assert [(output.index, output.finish_reason) for output in outputs] == [(index, FinishReason.ABORT)]
        assert engine.abort("r", index) == []
        engine.check_invariants()
    choices = {("r", index): Choice() for index in range(3) if index not in aborted}
    for output in before:
        if output.index not in aborted:
            choices["r", output.index].take(output)
    while engine.has_work():
        for output in engine.step():
            choices["r", output.index].take(output)
    assert choices == {("r", index): answer(request, ADAPTERS[0], index) for index in {0, 1, 2} - aborted}
    assert engine._states == {}
    memory.check_invariants({})


def test_a_choice_aborted_before_it_is_forked_frees_its_seat_at_once(engine: Engine) -> None:
    engine.add_request(ask("forks", [1] * 15, params=replace(GREEDY, n=6)))
    engine.add_request(ask("waits"))
    engine.step()
    assert engine.stats().num_waiting == 1
    engine.abort("forks", 5)
    engine.step()
    assert engine.stats().num_waiting == 0


def test_ended_requests_are_freed_without_the_garbage_collector(engine: Engine, runner: HashRunner) -> None:
    """The collector runs rarely: the number of objects triggers it, and even a long prompt is only a few."""
    with garbage_left_alone():
        engine.add_request(ask("ends"))
        engine.add_request(ask("forks", params=replace(GREEDY, n=3, logprobs=1)))
        engine.add_request(ask("aborted", [1] * 12))
        engine.step()
        engine.abort("aborted")
        run_to_idle(engine)
        runner.scheduled = []
        assert [kept for kept in gc.get_objects() if isinstance(kept, RequestState)] == []


def test_aborting_every_choice_separately_ends_the_request(engine: Engine, memory: AdapterMemory) -> None:
    for num_steps in (0, 1, 4):
        engine.add_request(ask("r", list(range(1, 15)), ADAPTERS[0], replace(GREEDY, n=3)))
        for _ in range(num_steps):
            engine.step()
        assert [engine.abort("r", index)[0].index for index in (1, 0, 2)] == [1, 0, 2]
        assert not engine.has_work()
        assert engine._states == {}
        memory.check_invariants({})
    assert engine.abort("r", 0) == []


def test_aborting_an_unknown_or_finished_choice_does_nothing(engine: Engine) -> None:
    engine.add_request(ask("r", params=replace(GREEDY, n=2)))
    for index in (2, -1, 1 << 40):
        assert engine.abort("r", index) == []
    assert engine.abort("never seen", 0) == []
    assert run_to_idle(engine).keys() == {("r", 0), ("r", 1)}
    assert engine.abort("r", 1) == []


def test_choices_that_are_never_forked_take_no_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_hash_engine(monkeypatch, max_num_seqs=3)
    engine.add_request(ask("wide", list(range(1, 15)), params=replace(GREEDY, n=3)))
    engine.step()
    engine.abort("wide", 2)
    engine.abort("wide", 0)
    engine.add_request(ask("next"))
    engine.step()
    assert {item.sequence.request.request_id for item in runner.scheduled} == {"wide", "next"}
    assert run_to_idle(engine).keys() == {("wide", 1), ("next", 0)}


# ---- adapters


def test_unload_is_acknowledged_once_when_the_last_choice_has_ended(engine: Engine, memory: AdapterMemory) -> None:
    adapter = ADAPTERS[0]
    engine.add_request(ask("r", adapter=adapter, params=SamplingParams(max_tokens=6, n=3, ignore_eos=True)))
    engine.step()
    engine.unload_adapter(adapter.digest)
    engine.unload_adapter(adapter.digest)
    while engine.has_work():
        assert engine.take_unloaded() == []
        assert memory.knows(adapter.digest)
        engine.step()
    assert engine.take_unloaded() == [adapter.digest]
    assert engine.take_unloaded() == []
    assert not memory.knows(adapter.digest)
    assert not memory.is_resident(adapter.digest)


def test_unload_of_an_idle_or_unknown_adapter_is_acknowledged_at_once(engine: Engine) -> None:
    engine.unload_adapter(ADAPTERS[0].digest)
    engine.unload_adapter("unknown")
    assert engine.take_unloaded() == [ADAPTERS[0].digest, "unknown"]


def test_an_abort_completes_an_unload(engine: Engine) -> None:
    engine.add_request(ask("waits", adapter=ADAPTERS[0]))
    engine.unload_adapter(ADAPTERS[0].digest)
    assert engine.take_unloaded() == []
    engine.abort("waits")
    assert engine.take_unloaded() == [ADAPTERS[0].digest]


def test_an_adapter_being_unloaded_refuses_new_requests_and_serves_old_ones(engine: Engine) -> None:
    engine.add_request(ask("old", adapter=ADAPTERS[0]))
    engine.unload_adapter(ADAPTERS[0].digest)
    with pytest.raises(EngineRequestError, match="is not loaded"):
        engine.add_request(ask("new", adapter=ADAPTERS[0]))
    assert run_to_idle(engine) == {("old", 0): answer(ask(), ADAPTERS[0])}


def test_an_adapter_can_be_loaded_again_after_unload(engine: Engine, paths: dict[TinyAdapter, Path]) -> None:
    for i in range(3):
        engine.unload_adapter(ADAPTERS[0].digest)
        engine.load_adapter(ADAPTERS[0].digest, str(paths[ADAPTERS[0]]))
        engine.add_request(ask(f"{i}", adapter=ADAPTERS[0]))
        assert run_to_idle(engine) == {(f"{i}", 0): answer(ask(), ADAPTERS[0])}


def test_a_failed_load_does_not_cancel_a_pending_unload(engine: Engine, tmp_path: Path) -> None:
    engine.add_request(ask("r", adapter=ADAPTERS[0]))
    engine.unload_adapter(ADAPTERS[0].digest)
    with pytest.raises(AdapterError):
        engine.load_adapter(ADAPTERS[0].digest, str(tmp_path / "missing.packed"))
    run_to_idle(engine)
    assert engine.take_unloaded() == [ADAPTERS[0].digest]


def test_a_corrupt_adapter_file_fails_every_choice_of_its_requests_and_no_others(
    engine: Engine, memory: AdapterMemory, tmp_path: Path
) -> None:
    broken = TinyAdapter(9, 2)
    path = broken.write(tmp_path)
    engine.load_adapter(broken.digest, str(path))
    damage(path)
    engine.add_request(ask("broken", adapter=broken, params=replace(GREEDY, n=2)))
    engine.add_request(ask("fine", adapter=ADAPTERS[0]))
    choices = run_to_idle(engine)
    assert choices["fine", 0] == answer(ask(), ADAPTERS[0])
    for index in (0, 1):
        assert choices["broken", index].finish_reason is FinishReason.ERROR
        assert "sha256" in (choices["broken", index].error or "")
        assert choices["broken", index].error_code is EngineErrorCode.ADAPTER_UNREADABLE
    memory.check_invariants({})
    broken.write(tmp_path)
    engine.add_request(ask("repaired", adapter=broken))
    assert run_to_idle(engine) == {("repaired", 0): answer(ask(), broken)}


def test_a_sibling_admitted_after_a_failed_choice_is_not_computed(
    engine: Engine, memory: AdapterMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both choices are preempted, the adapter is evicted, and reading its file fails once."""
    request = ask(adapter=ADAPTERS[0], params=replace(GREEDY, n=2, max_tokens=8))
    engine.add_request(request)
    engine.step()
    for sequence in list(engine._scheduler.running):
        engine._scheduler._preempt(sequence)
    memory._evict(ADAPTERS[0].digest)
    read, failures = AdapterFiles.read, [AdapterError("missing_file", "too many open files")]

    def read_flaky(self: AdapterFiles, digest: str, path: Path, *, verify: bool = False) -> object:
        if failures:
            raise failures.pop()
        return read(self, digest, path, verify=verify)

    monkeypatch.setattr(AdapterFiles, "read", read_flaky)
    choices = run_to_idle(engine)
    assert [choice.error for choice in choices.values()] == ["too many open files"] * 2
    memory.check_invariants({})


def test_every_order_of_actions_on_two_adapters_answers_all_requests(paths: dict[TinyAdapter, Path]) -> None:
    """Exhaustive: an arena for one of two adapters, three requests; submit, abort, unload and step in any order."""
    one, other = ADAPTERS[1], ADAPTERS[2]
    asked = {"a": one, "b": other, "c": one}
    memory = make_adapter_memory(3)
    params = replace(GREEDY, max_tokens=2)
    answers = {name: answer(ask(name, params=params), adapter) for name, adapter in asked.items()}
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine, _ = make_hash_engine(monkeypatch, adapters=memory)
    engine.load_adapter(other.digest, str(paths[other]))
    for order in product([*asked, "abort a", "unload", "step"], repeat=5):
        if any(order.count(action) > 1 for action in (*asked, "unload")):
            continue
        engine.load_adapter(one.digest, str(paths[one]))
        live: dict[str, Choice] = {}
        unloaded = []
        done = set()
        for action in (*order, *["step"] * 8):
            outputs = []
            done.add(action)
            if action in asked and (asked[action] is other or "unload" not in done):
                live[action] = Choice()
                engine.add_request(ask(action, adapter=asked[action], params=params))
            elif action == "abort a":
                outputs = engine.abort("a")
            elif action == "unload":
                engine.unload_adapter(one.digest)
            elif action == "step":
                outputs = engine.step()
            for output in outputs:
                live[output.request_id].take(output)
                if output.finish_reason is not None:
                    _check_answer(live.pop(output.request_id), answers[output.request_id])
            for digest in engine.take_unloaded():
                unloaded.append(digest)
                assert not any(asked[name] is one for name in live), "acknowledged while a request uses it"
        assert not live
        assert not engine.has_work()
        assert unloaded == [one.digest] * order.count("unload")
        memory.check_invariants({})


def _check_answer(choice: Choice, expected: Choice) -> None:
    if choice.finish_reason is FinishReason.ABORT:
        assert choice.token_ids == expected.token_ids[: len(choice.token_ids)]
    else:
        assert choice == expected


# ---- refused requests


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "the prompt has 0 tokens; 1 to 47 are allowed"),
        ([1] * 48, {}, "the prompt has 48 tokens"),
        ([VOCAB_SIZE], {}, "token id 30 is outside the vocabulary"),
        ([1, -1], {}, "token id -1 is outside"),
        ([1], {"stop_token_ids": (VOCAB_SIZE,)}, "token id 30 is outside"),
        ([1], {"stop_token_ids": (-5,)}, "token id -5 is outside"),
        ([1], {"allowed_token_ids": (1 << 40,)}, "is outside the vocabulary"),
        ([1], {"logit_bias": {VOCAB_SIZE + 1: 1.0}}, "token id 31 is outside"),
        ([1], {"n": 0}, "n is 0; 1 to 6"),
        ([1], {"n": 7}, "n is 7; 1 to 6"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_changes_nothing(
    engine: Engine, prompt: list[int], changes: dict[str, Any], message: str
) -> None:
    request = EngineRequest("r", prompt, replace(GREEDY, **changes), ADAPTERS[0].digest)
    with pytest.raises(EngineRequestError, match=message) as caught:
        engine.add_request(request)
    assert caught.value.code is EngineErrorCode.INVALID_REQUEST
    assert not engine.has_work()
    assert engine._states == {}
    assert engine._users.num_requests == {}


def test_an_id_in_use_is_refused_and_the_first_request_is_served(engine: Engine) -> None:
    engine.add_request(ask("r"))
    with pytest.raises(EngineRequestError, match="'r' is in use"):
        engine.add_request(ask("r", [9]))
    assert run_to_idle(engine) == {("r", 0): answer(ask())}


def test_an_unknown_adapter_is_refused_without_naming_others(engine: Engine) -> None:
    with pytest.raises(EngineRequestError) as caught:
        engine.add_request(ask(adapter=TinyAdapter(77, 1)))
    assert str(caught.value) == f"adapter {TinyAdapter(77, 1).digest[:12]} is not loaded"
    assert caught.value.code is EngineErrorCode.ADAPTER_NOT_LOADED


def test_an_engine_without_lora_refuses_adapters_and_serves_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_hash_engine(monkeypatch, adapters=None)
    with pytest.raises(AdapterError, match="without LoRA"):
        engine.load_adapter("digest", "/nowhere")
    with pytest.raises(EngineRequestError, match="is not loaded"):
        engine.add_request(ask(adapter=ADAPTERS[0]))
    engine.unload_adapter("digest")
    assert engine.take_unloaded() == ["digest"]
    engine.add_request(ask())
    assert run_to_idle(engine) == {("r", 0): answer(ask())}


# ---- out of memory


def test_a_step_that_runs_out_of_memory_names_the_flags(
    engine: Engine, runner: HashRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine.add_request(ask())
    engine.step()
    monkeypatch.setattr(runner, "forward", fail)
    flags = "--gpu-memory-utilization, --max-num-seqs, .*--max-num-batched-tokens"
    with pytest.raises(EngineStepError, match=rf"for a step: lower {flags} \(CUDA out of memory\. Tried"):
        engine.step()


# ---- statistics


def test_statistics_count_requests_tokens_adapters_and_blocks(engine: Engine) -> None:
    engine.add_request(ask("a", list(range(1, 9)), ADAPTERS[0]))
    engine.add_request(ask("b", list(range(1, 6)), ADAPTERS[2]))
    engine.step()
    during = engine.stats()
    assert (during.num_running, during.num_waiting, during.recent_step_tokens) == (2, 0, [10])
    assert during.running_adapters == sorted([ADAPTERS[0].digest, ADAPTERS[2].digest])
    run_to_idle(engine)
    after = engine.stats()
    assert (after.num_prompt_tokens, after.num_generation_tokens) == (13, 8)
    assert (after.num_adapter_loads, after.num_adapter_evictions) == (2, 0)
    assert after.arena_used_bytes == after.arena_size_bytes == 1024
    assert after.num_free_blocks + after.num_cached_blocks == after.num_blocks == 12
    assert (after.running_adapters, after.waiting_adapters) == ([], [])


def test_statistics_do_not_iterate_over_the_fair_queue(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def order(_: FairQueue) -> None:
        raise AssertionError("of thousands of tenants it takes long, and statistics come ten times a second")

    engine.add_request(ask("a", [1, 2, 3], ADAPTERS[0]))
    monkeypatch.setattr(FairQueue, "__iter__", order)
    stats = engine.stats()
    assert (stats.num_waiting, stats.waiting_adapters) == (1, [ADAPTERS[0].digest])


def test_statistics_of_a_new_engine_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_hash_engine(monkeypatch)
    assert engine.stats() == EngineStats(num_blocks=12, num_free_blocks=12)
    assert engine.step() == []
    assert engine.stats().step == 0


# ---- begun prompts


@pytest.fixture
def begun(engine: Engine) -> list[BegunPrompt]:
    told: list[BegunPrompt] = []
    engine.on_prompts_begun = told.extend
    return told


def test_a_prompt_is_reported_as_begun_once_before_its_first_forward_pass(
    engine: Engine, runner: HashRunner, begun: list[BegunPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a prompt of several steps and choices, one of a single step, and a pooled one."""
    forward, before_each = runner.forward, []

    def watched(*args: Any) -> Any:
        before_each.append([prompt.request_id for prompt in begun])
        return forward(*args)

    monkeypatch.setattr(runner, "forward", watched)
    long = list(range(1, 24))
    requests = [
        ask("long", long, params=replace(GREEDY, n=2)),
        ask("short"),
        replace(ask("pooled", [5, 6]), pooling=PoolingParams(Pooling.MEAN)),
    ]
    for request in requests:
        before_each.clear()
        engine.add_request(request)
        run_to_idle(engine)
        assert before_each[0][-1] == request.request_id
    assert [prompt.request_id for prompt in begun] == ["long", "short", "pooled"]
    assert all(prompt.queue_s >= 0 for prompt in begun)


def test_a_begun_prompt_reports_its_number_of_cached_tokens(engine: Engine, begun: list[BegunPrompt]) -> None:
    prompt = list(range(1, 24))
    for name, tokens in (("before", prompt[:12]), ("found", prompt)):
        engine.add_request(ask(name, tokens, params=replace(GREEDY, n=2)))
        run_to_idle(engine)
    assert [(told.request_id, told.num_cached_tokens) for told in begun] == [("before", 0), ("found", 12)]


def test_preempted_prompts_are_not_reported_as_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_hash_engine(monkeypatch, num_blocks=12, max_num_batched_tokens=7)
    begun: list[BegunPrompt] = []
    engine.on_prompts_begun = begun.extend
    for i in range(6):
        engine.add_request(ask(f"{i}", [i + 1] * 12, params=replace(GREEDY, max_tokens=16)))
    run_to_idle(engine)
    assert engine.stats().num_preemptions > 3
    assert sorted(prompt.request_id for prompt in begun) == [f"{i}" for i in range(6)]


def test_a_failed_request_was_begun_but_one_aborted_while_waiting_was_not(
    engine: Engine, runner: HashRunner, begun: list[BegunPrompt]
) -> None:
    engine.add_request(ask("waits"))
    engine.abort("waits")
    runner.poison_next = 0
    engine.add_request(ask("fails"))
    (failed,) = engine.step()
    assert failed.error == NOT_FINITE_MESSAGE
    assert [prompt.request_id for prompt in begun] == ["fails"]

"""Steps that continue the last one, queued ahead on a device that lags behind the host or not queued ahead, give the
same results as steps taken one at a time."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraserve_kernels.decoder_model import ModelOutput
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from loraserve.engine.adapters.arrival import StepArrivals
from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.device.accelerator import upload_ids
from loraserve.engine.device.step_buffers import StepBuffers
from loraserve.engine.engine import NOT_FINITE_MESSAGE, Engine
from loraserve.engine.request import EngineErrorCode, EngineRequest, FinishReason, SamplingParams, SequenceOutput
from loraserve.engine.sampling.sampler import Sampled
from loraserve.engine.steps import queue
from loraserve.engine.steps.in_flight import StepInFlight
from tests.support.delayed_accelerator import DelayedAccelerator
from tests.support.hash_model import (
    BASE,
    LOGITS_SIZE,
    Choice,
    HashRunner,
    expected_choice,
    make_hash_engine,
    run_to_idle,
)
from tests.support.host_accelerator import HostEvent
from tests.support.manual_threads import use_manual_threads
from tests.support.packed_adapters import TinyAdapter, damage, make_adapter_memory

ADAPTERS = [TinyAdapter(value, num_units) for value, num_units in enumerate((1, 2, 3), start=1)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=4)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[TinyAdapter, Path]:
    folder = tmp_path_factory.mktemp("packed")
    return {adapter: adapter.write(folder) for adapter in ADAPTERS}


@pytest.fixture
def accelerator() -> DelayedAccelerator:
    return DelayedAccelerator()


@pytest.fixture
def memory() -> AdapterMemory:
    """Room for one or two adapters."""
    return make_adapter_memory(3)


@pytest.fixture
def parts(
    monkeypatch: pytest.MonkeyPatch,
    memory: AdapterMemory,
    paths: dict[TinyAdapter, Path],
    accelerator: DelayedAccelerator,
) -> tuple[Engine, HashRunner]:
    engine, runner = make_hash_engine(monkeypatch, adapters=memory, accelerator=accelerator)
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
) -> EngineRequest:
    return EngineRequest(name, prompt or [1, 2, 3, 4, 5], params, None if adapter is None else adapter.digest)


def answer(request: EngineRequest, adapter: TinyAdapter | None = None, index: int = 0) -> Choice:
    return expected_choice(request, index, BASE if adapter is None else adapter.value)


def collect(choices: dict[str, Choice], outputs: list[SequenceOutput]) -> None:
    for output in outputs:
        choices[output.request_id].take(output)


def step_until_in_flight(engine: Engine) -> list[SequenceOutput]:
    """Step until a step is left in flight; returns the outputs until then."""
    outputs = []
    for _ in range(100):
        outputs += engine.step()
        if engine._in_flight is not None:
            return outputs
    pytest.fail("no step was queued ahead")


# ---- tokens

workload = st.lists(
    st.tuples(
        st.integers(1, 20).map(lambda length: [i % 7 + 1 for i in range(length)]),
        st.sampled_from([None, *ADAPTERS]),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 16),
            n=st.sampled_from([1, 1, 1, 2, 3]),
            temperature=st.sampled_from([0.0, 1.0]),
            top_k=st.sampled_from([0, 3]),
            repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
            frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
            logit_bias=st.sampled_from([{}, {}, {3: 5.0, 11: -5.0}]),
            allowed_token_ids=st.sampled_from([(), (), (), tuple(range(2, 20))]),
            seed=st.integers(0, 9),
            stop_token_ids=st.sampled_from([(), (3, 4)]),
            ignore_eos=st.booleans(),
            min_tokens=st.sampled_from([0, 0, 0, 2, 5]),
            logprobs=st.sampled_from([None, None, 0, 2]),
            prompt_logprobs=st.sampled_from([None, None, None, 1]),
        ),
        st.integers(0, 6),
    ),
    min_size=2,
    max_size=8,
)


@pytest.mark.parametrize("device", ["host", "gpu", "gpu that cannot sample"])
@settings(derandomize=True, deadline=None, max_examples=60)
@given(workload=workload, num_blocks=st.sampled_from([12, 40]))
def test_every_workload_gets_the_same_tokens_as_with_one_step_at_a_time(
    device: str,
    paths: dict[TinyAdapter, Path],
    workload: list[tuple[list[int], TinyAdapter | None, SamplingParams, int]],
    num_blocks: int,
) -> None:
    """With 12 blocks, sequences are preempted; requests arrive while others run."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine, _ = make_hash_engine(
            monkeypatch,
            adapters=make_adapter_memory(6),
            num_blocks=num_blocks,
            accelerator=None if device == "host" else DelayedAccelerator(),
        )
    if device == "gpu that cannot sample":
        engine._steps._sampler._device = None
    for adapter, path in paths.items():
        engine.load_adapter(adapter.digest, str(path))
    choices: dict[tuple[str, int], Choice] = {}
    for i, (prompt, adapter, params, num_steps) in enumerate(workload):
        engine.add_request(ask(f"{i}", prompt, adapter, params))
        for output in [output for _ in range(num_steps) for output in engine.step()]:
            choices.setdefault((output.request_id, output.index), Choice()).take(output)
    while engine.has_work():
        for output in engine.step():
            choices.setdefault((output.request_id, output.index), Choice()).take(output)
    max_model_len = min(48, num_blocks * 4)
    for i, (prompt, adapter, params, _) in enumerate(workload):
        value = BASE if adapter is None else adapter.value
        for index in range(params.n):
            request = ask(f"{i}", prompt, adapter, params)
            assert choices[f"{i}", index] == expected_choice(request, index, value, max_model_len)


def test_choices_of_one_prompt_are_queued_ahead_once_each_has_its_own_last_block(
    engine: Engine, runner: HashRunner
) -> None:
    request = ask(params=replace(DRAWN, n=3))
    engine.add_request(request)
    assert run_to_idle(engine) == {("r", index): answer(request, index=index) for index in range(3)}
    assert runner.num_ahead >= 9


# ---- steps that continue the last one, on the host


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        DRAWN,
        replace(GREEDY, logprobs=1),
        replace(DRAWN, repetition_penalty=1.3, frequency_penalty=0.5),
        replace(GREEDY, prompt_logprobs=1),
    ],
    ids=["greedy", "drawn", "logprobs", "penalties", "prompt_logprobs"],
)
def test_a_step_with_the_last_steps_sequences_reuses_its_batch(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = make_hash_engine(monkeypatch, num_blocks=40)
    asked = {name: ask(name, [length] * length, params=params) for length, name in enumerate("abcd", 1)}
    for request in asked.values():
        engine.add_request(request)
    assert run_to_idle(engine) == {(name, 0): answer(request) for name, request in asked.items()}
    assert runner.num_forwards == 12
    assert runner.num_again == 12 - 2, "beside the prompts, the first step of decoding alone"


def test_a_step_that_reuses_the_last_batch_does_not_choose_a_token_banned_for_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_token_id = answer(ask()).token_ids[2]
    request = ask(params=replace(GREEDY, min_tokens=10, stop_token_ids=(stop_token_id,)))
    assert stop_token_id not in answer(request).token_ids[:9]
    engine, runner = make_hash_engine(monkeypatch)
    engine.add_request(request)
    assert run_to_idle(engine) == {("r", 0): answer(request)}
    assert runner.num_again > 7


def test_a_step_after_a_sequence_ended_does_not_reuse_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_hash_engine(monkeypatch)
    engine.add_request(ask("short", params=replace(GREEDY, max_tokens=4)))
    engine.add_request(ask("long", params=replace(GREEDY, max_tokens=9)))
    run_to_idle(engine)
    assert runner.num_forwards == 9
    assert runner.num_again == (4 - 2) + (5 - 1)


# ---- waits


def test_the_next_step_is_queued_while_the_one_before_runs(
    engine: Engine, runner: HashRunner, accelerator: DelayedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For drawn tokens too: their parameters are copied after a forward pass, and nothing waits for the copy."""
    ends: list[HostEvent] = []
    were_done: list[list[bool]] = []
    forward, wait = runner.forward, StepInFlight.wait

    def forward_and_record(batch: StepBatch, arrivals: StepArrivals | None = None) -> ModelOutput:
        output = forward(batch, arrivals)
        ends.append(accelerator.record())
        return output

    def look_and_wait(step: StepInFlight) -> Sampled:
        if engine._in_flight is not None:
            were_done.append([end.is_done for end in ends[-3:]])
        return wait(step)

    monkeypatch.setattr(runner, "forward", forward_and_record)
    monkeypatch.setattr(StepInFlight, "wait", look_and_wait)
    engine.add_request(ask("greedy"))
    engine.add_request(ask("drawn", params=DRAWN))
    run_to_idle(engine)
    assert were_done == [[False, False], *[[True, False, False]] * 10]


def test_a_sequence_that_ends_by_length_has_no_row_computed_for_nothing(
    monkeypatch: pytest.MonkeyPatch, accelerator: DelayedAccelerator
) -> None:
    """At its own maximum length or at the model's, 48 tokens."""
    engine, runner = make_hash_engine(monkeypatch, accelerator=accelerator, num_blocks=20)
    asked = {
        "short": ask("short", params=replace(GREEDY, max_tokens=7)),
        "long": ask("long", [1] * 40, params=replace(GREEDY, max_tokens=100)),
    }
    for request in asked.values():
        engine.add_request(request)
    choices = {name: Choice() for name in asked}
    while engine.has_work():
        collect(choices, engine.step())
    assert choices == {name: answer(request) for name, request in asked.items()}
    assert sum(engine.stats().recent_step_tokens) == 5 + 6 + 40 + 7
    assert runner.num_ahead > 0


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, logprobs=1),
        replace(GREEDY, min_tokens=5),
        replace(DRAWN, repetition_penalty=1.3, frequency_penalty=0.5),
        replace(GREEDY, allowed_token_ids=(3, 8, 9), logit_bias={9: 1.0}),
    ],
    ids=["logprobs", "min_tokens", "penalties", "allowed"],
)
def test_steps_are_queued_ahead_for_every_kind_of_sampling(
    engine: Engine, runner: HashRunner, params: SamplingParams
) -> None:
    asked = {"special": ask("special", params=params), "plain": ask("plain")}
    for request in asked.values():
        engine.add_request(request)
    assert run_to_idle(engine) == {(name, 0): answer(request) for name, request in asked.items()}
    assert runner.num_ahead == 12 - 1
    assert runner.num_again == 12 - 2


@pytest.mark.parametrize(
    ("others", "num_beside"),
    [([DRAWN, replace(DRAWN, logprobs=2)], 0), ([replace(GREEDY, repetition_penalty=1.3)], 12)],
    ids=["drawn", "edited"],
)
def test_sampling_parameters_are_copied_with_the_batch(
    engine: Engine,
    runner: HashRunner,
    others: list[SamplingParams],
    num_beside: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One copy per step, unless logits are edited."""
    num_copies = 0
    upload = StepBuffers.upload

    def count(buffers: StepBuffers, end_bytes: int) -> None:
        nonlocal num_copies
        num_copies += 1
        upload(buffers, end_bytes)

    monkeypatch.setattr(StepBuffers, "upload", count)
    asked = {f"{index}": ask(f"{index}", params=params) for index, params in enumerate([GREEDY, *others])}
    for request in asked.values():
        engine.add_request(request)
    assert run_to_idle(engine) == {(name, 0): answer(request) for name, request in asked.items()}
    assert num_copies == runner.num_forwards + num_beside


class NoHostIndex(TorchFunctionMode):
    """Fails if logits are indexed with host data: with a device, the host would wait for its copy."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__getitem__ and args[0].shape[-1:] == (LOGITS_SIZE,):
            assert not isinstance(args[1], list | np.ndarray), "the host waits for the rows' numbers to be copied"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("params", [replace(DRAWN, n=3), replace(GREEDY, prompt_logprobs=1)], ids=["forks", "prompt"])
def test_the_rows_to_sample_are_selected_without_a_wait(
    engine: Engine, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    picked: list[list[int]] = []

    def note(rows: list[int], device: torch.device) -> Tensor:
        picked.append(rows)
        return upload_ids(rows, device)

    monkeypatch.setattr(queue, "upload_ids", note)
    request = ask(params=params)
    engine.add_request(request)
    with NoHostIndex():
        choices = run_to_idle(engine)
    assert choices == {("r", index): answer(request, index=index) for index in range(params.n)}
    assert picked == [[0, 0, 0] if params.n == 3 else [4]]


# ---- requests that arrive


def test_a_request_added_while_a_step_is_in_flight_is_in_the_step_queued_after_it(
    engine: Engine, runner: HashRunner
) -> None:
    engine.add_request(ask("first"))
    step_until_in_flight(engine)
    engine.add_request(ask("second", params=DRAWN))
    num_ahead = runner.num_ahead
    choices = {"first": Choice([0]), "second": Choice()}
    collect(choices, engine.step())
    assert runner.num_ahead == num_ahead + 1
    assert {item.sequence.request.request_id for item in runner.scheduled} == {"first", "second"}
    while engine.has_work():
        collect(choices, engine.step())
    assert runner.num_ahead == runner.num_forwards - 1
    assert choices["second"] == answer(ask("second", params=DRAWN))


def test_steps_with_chunks_of_a_long_prompt_are_queued_ahead(
    monkeypatch: pytest.MonkeyPatch, accelerator: DelayedAccelerator
) -> None:
    """The chunks have 9 rows."""
    engine, runner = make_hash_engine(monkeypatch, accelerator=accelerator, num_blocks=20)
    asked = {"decodes": ask("decodes"), "prompt": ask("prompt", [i % 7 + 1 for i in range(30)])}
    choices = {name: Choice() for name in asked}
    engine.add_request(asked["decodes"])
    collect(choices, step_until_in_flight(engine))
    engine.add_request(asked["prompt"])
    while engine.has_work():
        collect(choices, engine.step())
    assert choices == {name: answer(request) for name, request in asked.items()}
    assert runner.num_ahead == runner.num_forwards - 1


def test_choices_of_a_prompt_computed_ahead_are_forked_ahead(
    monkeypatch: pytest.MonkeyPatch, accelerator: DelayedAccelerator
) -> None:
    engine, runner = make_hash_engine(monkeypatch, accelerator=accelerator, num_blocks=30)
    forks = ask("forks", params=replace(DRAWN, n=3))
    engine.add_request(ask("first"))
    step_until_in_flight(engine)
    engine.add_request(forks)
    choices = run_to_idle(engine)
    assert {index: choices["forks", index] for index in range(3)} == {
        index: answer(forks, index=index) for index in range(3)
    }
    assert runner.num_ahead == runner.num_forwards - 1


def test_a_prompt_step_whose_first_choice_was_aborted_is_not_lost(engine: Engine) -> None:
    """The first choice, which computes the prompt, is aborted; the step's other sequence ends before it."""
    short, forks = ask("short", params=replace(GREEDY, max_tokens=2)), ask("forks", params=replace(DRAWN, n=2))
    long = replace(forks, prompt_token_ids=[i % 7 + 1 for i in range(20)])
    engine.add_request(short)
    engine.add_request(long)
    choices = {("short", 0): Choice(), ("forks", 0): Choice(), ("forks", 1): Choice()}

    def take(outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            choices[output.request_id, output.index].take(output)

    take(engine.step())
    take(engine.abort("forks", 0))
    while engine.has_work():
        take(engine.step())
    assert choices["short", 0] == answer(short)
    assert choices["forks", 0].finish_reason is FinishReason.ABORT
    assert choices["forks", 1] == answer(long, index=1)


def test_a_prompt_alone_in_the_next_step_is_not_lost(engine: Engine, runner: HashRunner) -> None:
    """No sequence of the step before continues, and the prompt gets no token yet."""
    short = ask("short", params=replace(GREEDY, max_tokens=1))
    long = ask("long", [i % 7 + 1 for i in range(30)])
    choices = {"short": Choice(), "long": Choice()}
    engine.add_request(short)
    engine.add_request(long)
    while engine.has_work():
        collect(choices, engine.step())
    assert choices == {"short": answer(short), "long": answer(long)}
    stats = engine.stats()
    assert sum(stats.recent_step_tokens) == 5 + 30 + 11
    assert stats.step == runner.num_forwards


def test_an_unreadable_adapter_fails_only_the_request_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, accelerator: DelayedAccelerator, tmp_path: Path
) -> None:
    engine, runner = make_hash_engine(monkeypatch, adapters=make_adapter_memory(3), accelerator=accelerator)
    path = ADAPTERS[0].write(tmp_path)
    engine.load_adapter(ADAPTERS[0].digest, str(path))
    damage(path)
    engine.add_request(ask("first"))
    choices = {"first": Choice(), "fails": Choice()}
    collect(choices, step_until_in_flight(engine))
    engine.add_request(ask("fails", adapter=ADAPTERS[0]))
    while engine.has_work():
        collect(choices, engine.step())
    assert choices["first"] == answer(ask("first"))
    assert choices["fails"].error_code is EngineErrorCode.ADAPTER_UNREADABLE
    assert runner.num_ahead == runner.num_forwards - 1


def test_steps_are_queued_ahead_while_requests_wait_for_seats(
    monkeypatch: pytest.MonkeyPatch, accelerator: DelayedAccelerator
) -> None:
    engine, runner = make_hash_engine(monkeypatch, accelerator=accelerator, max_num_seqs=2)
    asked = {f"{i}": ask(f"{i}", params=replace(GREEDY, max_tokens=9 + i)) for i in range(5)}
    for request in asked.values():
        engine.add_request(request)
    step_until_in_flight(engine)
    assert engine.stats().num_waiting == 3
    engine.step()
    assert engine._in_flight is not None
    assert run_to_idle(engine).keys() >= {("4", 0)}
    assert runner.num_ahead > runner.num_forwards // 2


# ---- sequences that leave


def stopped(remainder: int) -> tuple[EngineRequest, int]:
    """A request that a stop token ends, and its number of output tokens. Prompt and output tokens modulo 4 give
    `remainder`."""
    for first in range(10, 20):
        prompt = list(range(first, first + 5))
        tokens = answer(ask(prompt=prompt)).token_ids
        for place in range(3, 10):
            if (5 + place + 1) % 4 == remainder and tokens[place] not in tokens[:place]:
                params = replace(GREEDY, stop_token_ids=(tokens[place],))
                return ask("stopped", prompt, params=params), place + 1
    pytest.fail("choose other prompts")


@pytest.mark.parametrize("remainder", range(4))
def test_a_row_computed_for_nothing_leaves_no_token_block_or_prefix(
    engine: Engine, runner: HashRunner, remainder: int
) -> None:
    """Even if the row would fill a block of 4."""
    request, num_tokens = stopped(remainder)
    engine.add_request(request)
    first = run_to_idle(engine)
    assert first == {("stopped", 0): answer(request)}
    stats = engine.stats()
    assert runner.num_forwards == num_tokens + 1
    assert stats.num_generation_tokens == num_tokens
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    again = ask("again", [*request.prompt_token_ids, *first["stopped", 0].token_ids, 9, 9, 9, 9])
    engine.add_request(again)
    assert run_to_idle(engine) == {("again", 0): answer(again)}
    assert engine.stats().prefix_cache_hits == (5 + num_tokens - 1) // 4 * 4


def test_an_abort_in_flight_frees_everything_at_once_and_affects_no_other_request(
    engine: Engine, memory: AdapterMemory
) -> None:
    engine.add_request(ask("goes", adapter=ADAPTERS[0]))
    engine.add_request(ask("stays"))
    choices = {"goes": Choice(), "stays": Choice()}
    collect(choices, step_until_in_flight(engine))
    outputs = engine.abort("goes")
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
    engine.check_invariants()
    memory.check_invariants({})
    while engine.has_work():
        collect({"stays": choices["stays"]}, engine.step())
    assert choices["stays"] == answer(ask())


def test_aborting_the_last_request_in_flight_leaves_no_work(engine: Engine) -> None:
    engine.add_request(ask())
    step_until_in_flight(engine)
    engine.abort("r")
    assert not engine.has_work()
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == 12
    engine.add_request(ask("next"))
    choice = Choice()
    collect({"next": choice}, engine.step())
    assert len(choice.token_ids) == 1, "nobody waits for what nobody wants"
    while engine.has_work():
        collect({"next": choice}, engine.step())
    assert choice == answer(ask())


def test_a_reused_request_id_gets_nothing_from_the_row_in_flight(engine: Engine) -> None:
    engine.add_request(ask("other", [7, 8, 9]))
    engine.add_request(ask("r"))
    step_until_in_flight(engine)
    engine.abort("r")
    engine.add_request(ask("r", [9, 9, 9], params=DRAWN))
    choices = {"r": Choice(), "other": Choice()}
    while engine.has_work():
        collect(choices, engine.step())
    assert choices["r"] == answer(ask(prompt=[9, 9, 9], params=DRAWN))


def test_aborting_one_choice_in_flight_does_not_affect_the_others(engine: Engine) -> None:
    request = ask(params=replace(DRAWN, n=3))
    engine.add_request(request)
    choices = {index: Choice() for index in range(3)}
    for output in step_until_in_flight(engine):
        choices[output.index].take(output)
    for output in engine.abort("r", 1):
        choices[output.index].take(output)
    while engine.has_work():
        for output in engine.step():
            choices[output.index].take(output)
    assert choices[1].finish_reason is FinishReason.ABORT
    assert (choices[0], choices[2]) == (answer(request, index=0), answer(request, index=2))


def test_an_adapter_unloaded_in_flight_makes_room_for_another(engine: Engine, memory: AdapterMemory) -> None:
    large, other = ADAPTERS[2], ADAPTERS[1]
    engine.add_request(ask("goes", adapter=large))
    engine.add_request(ask("stays"))
    choices = {"goes": Choice(), "stays": Choice(), "comes": Choice()}
    collect(choices, step_until_in_flight(engine))
    engine.unload_adapter(large.digest)
    assert engine.take_unloaded() == []
    engine.abort("goes")
    assert engine.take_unloaded() == [large.digest]
    assert not memory.knows(large.digest)
    engine.add_request(ask("comes", adapter=other))
    while engine.has_work():
        collect(choices, engine.step())
    assert choices["stays"] == answer(ask())
    assert choices["comes"] == answer(ask(), other)


def test_an_adapter_is_not_overwritten_before_the_step_in_flight_has_read_it(
    monkeypatch: pytest.MonkeyPatch, accelerator: DelayedAccelerator, paths: dict[TinyAdapter, Path]
) -> None:
    use_manual_threads(monkeypatch)
    memory = make_adapter_memory(3, accelerator=accelerator)
    engine, runner = make_hash_engine(monkeypatch, adapters=memory, accelerator=accelerator)
    large, other = ADAPTERS[2], ADAPTERS[1]
    for adapter in (large, other):
        engine.load_adapter(adapter.digest, str(paths[adapter]))
    ends: list[HostEvent] = []
    forward = runner.forward

    def forward_and_record(batch: StepBatch, arrivals: StepArrivals | None = None) -> ModelOutput:
        output = forward(batch, arrivals)
        ends.append(accelerator.record())
        return output

    monkeypatch.setattr(runner, "forward", forward_and_record)
    engine.add_request(ask("goes", adapter=large))
    step_until_in_flight(engine)
    in_flight, num_waits = ends[-1], len(accelerator.waited_for)
    engine.abort("goes")
    engine.add_request(ask("comes", adapter=other))
    choice = Choice()
    while engine.has_work():
        collect({"comes": choice}, engine.step())
    assert choice == answer(ask(), other)
    order = accelerator.events
    waits = [event for event in accelerator.waited_for[num_waits:] if isinstance(event, HostEvent)]
    assert order.index(waits[0]) > order.index(in_flight)


@pytest.mark.parametrize("place", [0, 1])
def test_non_finite_values_fail_only_their_owner_even_if_a_later_step_is_queued(
    engine: Engine, runner: HashRunner, place: int
) -> None:
    for name in ("a", "b"):
        engine.add_request(ask(name))
    choices = {"a": Choice(), "b": Choice()}
    collect(choices, step_until_in_flight(engine))
    runner.poison_next = place
    while engine.has_work():
        collect(choices, engine.step())
    failed = runner.poisoned.pop()
    kept = ({"a", "b"} - {failed}).pop()
    assert choices[failed].error == NOT_FINITE_MESSAGE
    assert choices[kept] == answer(ask())
    assert runner.non_finite_blocks() == set()


def test_stats_count_a_step_when_it_is_collected(engine: Engine) -> None:
    engine.add_request(ask(params=replace(GREEDY, max_tokens=4)))
    engine.step()
    during = engine.stats()
    assert (during.step, during.recent_step_tokens, during.num_generation_tokens) == (1, [5], 1)
    run_to_idle(engine)
    after = engine.stats()
    assert (after.step, after.num_prompt_tokens, after.num_generation_tokens) == (4, 5, 4)

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loraserve.engine.request import EngineErrorCode, FinishReason, Pooling, PoolingParams, SamplingParams
from loraserve.serving.bound_adapter import BoundAdapter
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.generation import GenerationJob, Prompt, collect
from loraserve.serving.runtime import Runtime, build_runtime
from loraserve.serving.text.choice import ChoiceDelta, TextOptions
from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import make_settings
from tests.support.named_adapters import NoAdapters

TEXT = TextOptions(eos_token_ids=frozenset({1}))


def job(
    num_prompts: int = 1,
    adapter: BoundAdapter | None = None,
    text: TextOptions = TEXT,
    n: int = 1,
    max_tokens: int = 6,
) -> GenerationJob:
    prompts = [Prompt([10 + index, 11], SamplingParams(max_tokens, n=n)) for index in range(num_prompts)]
    return GenerationJob(prompts, adapter, text, received_s=0.0)


def runtime_for(engine: FakeEngine, **changes: object) -> Runtime:
    return build_runtime(engine, make_settings(Path("/nonexistent"), **changes), NoAdapters())


@pytest.mark.parametrize(("num_prompts", "n"), [(1, 1), (1, 3), (5, 2)])
def test_every_choice_is_complete_and_in_order(num_prompts: int, n: int) -> None:
    async def run() -> None:
        engine = FakeEngine(num_cached_tokens=1)
        runtime = runtime_for(engine)
        generation = runtime.generation.start(job(num_prompts, n=n))
        assert runtime.lifecycle.num_sequences == num_prompts * n
        deltas = await collect(generation.steps())
        assert [(delta.prompt_index, delta.index) for delta in deltas] == [
            (prompt, index) for prompt in range(num_prompts) for index in range(n)
        ]
        for delta in deltas:
            request = generation.prompts[delta.prompt_index].engine_request
            assert delta.token_ids == engine.reply(request, delta.index)[:6]
            assert delta.finish_reason is FinishReason.LENGTH
        usage = generation.usage()
        assert usage.num_prompt_tokens == 2 * num_prompts
        assert usage.num_completion_tokens == 6 * num_prompts * n
        assert usage.num_cached_tokens == num_prompts
        assert runtime.lifecycle.num_sequences == 0
        assert not engine.running
        assert not engine.aborted

    asyncio.run(run())


def test_a_step_has_at_most_one_delta_per_choice() -> None:
    async def run() -> None:
        runtime = runtime_for(FakeEngine())
        generation = runtime.generation.start(job(3, n=2))
        async for deltas in generation.steps():
            keys = [(delta.prompt_index, delta.index) for delta in deltas]
            assert len(set(keys)) == len(keys)

    asyncio.run(run())


def test_a_stop_string_ends_its_choice_and_the_request_if_it_is_the_last_choice() -> None:
    async def run() -> None:
        engine = FakeEngine(reply=lambda request, index: ([40, 41] if index == 0 else [42]) * 500)
        runtime = runtime_for(engine)
        first, second = (chr(ord(runtime.tokenizer.token_text.text_of(token_id))) for token_id in (41, 42))
        text = TextOptions(eos_token_ids=frozenset({1}), stop=(first, second * 4))
        generation = runtime.generation.start(job(1, text=text, n=2, max_tokens=1000))
        deltas = await collect(generation.steps())
        assert [len(delta.token_ids) for delta in deltas] == [2, 4]
        assert [delta.stop_reason for delta in deltas] == [first, second * 4]
        assert len(engine.aborted) == 1
        assert engine.aborted_choices == {(engine.aborted[0], 0), (engine.aborted[0], 1)}
        assert generation.usage().num_completion_tokens == 6

    asyncio.run(run())


def test_a_choice_that_stopped_is_aborted_while_its_siblings_continue() -> None:
    async def run() -> None:
        engine = FakeEngine(reply=lambda request, index: [40 + index] * 1000)
        runtime = runtime_for(engine)
        text = TextOptions(eos_token_ids=frozenset({1}), stop=(runtime.tokenizer.token_text.text_of(41) * 3,))
        generation = runtime.generation.start(job(1, text=text, n=3, max_tokens=50))
        request_id = generation.prompts[0].engine_request.request_id
        deltas = await collect(generation.steps())
        assert engine.aborted_choices == {(request_id, 1)}
        assert not engine.aborted
        assert [len(delta.token_ids) for delta in deltas] == [50, 3, 50]

    asyncio.run(run())


def test_requests_that_the_engine_ended_are_not_aborted() -> None:
    async def run() -> None:
        engine = FakeEngine(tokens_per_step=9)
        runtime = runtime_for(engine)
        aborts: list[str] = []
        engine.abort = lambda request_id, index=None: aborts.append(request_id)  # pyright: ignore[reportAttributeAccessIssue]
        text = TextOptions(eos_token_ids=frozenset({1}), stop=("never said",))
        await collect(runtime.generation.start(job(3, text=text, n=2)).steps())
        assert aborts == []

    asyncio.run(run())


def test_a_prompt_that_stopped_is_aborted_while_others_continue() -> None:
    async def run() -> None:
        engine = FakeEngine(reply=lambda request, index: [40 + request.prompt_token_ids[0] % 2] * 1000)
        runtime = runtime_for(engine)
        text = TextOptions(eos_token_ids=frozenset({1}), stop=(runtime.tokenizer.token_text.text_of(40),))
        generation = runtime.generation.start(job(2, text=text, max_tokens=1000))
        steps = generation.steps()
        while not generation.prompts[0].finished:
            await anext(steps)
        assert engine.aborted == [generation.prompts[0].engine_request.request_id]
        assert not generation.prompts[1].finished
        await steps.aclose()
        assert runtime.lifecycle.num_sequences == 0

    asyncio.run(run())


@pytest.mark.parametrize("num_prompts", [1, 4])
def test_closing_aborts_running_requests_and_is_idempotent(num_prompts: int) -> None:
    async def run() -> None:
        engine = FakeEngine()
        runtime = runtime_for(engine)
        generation = runtime.generation.start(job(num_prompts, max_tokens=1000))
        steps = generation.steps()
        await anext(steps)
        generation.close()
        generation.close()
        assert len(engine.aborted) == num_prompts
        assert runtime.lifecycle.num_sequences == 0
        await steps.aclose()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not engine.running
        assert b'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} %d' % num_prompts in (
            runtime.metrics.render()
        )

    asyncio.run(run())


def num_counted(runtime: Runtime) -> list[float]:
    """Counted prompt tokens, under our name and vLLM's; empty if nothing was counted yet."""
    rows = [row.split() for row in runtime.metrics.render().decode().splitlines()]
    names = ("loraserve_prompt_tokens_total{", "vllm:prompt_tokens_total{")
    return [float(value) for name, *_, value in rows if name.startswith(names)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


async def leave(steps: AsyncGenerator[list[ChoiceDelta]], when: Callable[[], bool]) -> None:
    """Cancels the reader while it waits for the first delta."""
    first = asyncio.ensure_future(anext(steps))
    await until(when)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not first.done()
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first


def jobs_of_tokens_and_vectors(n: int = 1) -> list[GenerationJob]:
    pooled = [Prompt([10, 11], SamplingParams(1), pooling=PoolingParams(Pooling.LAST))]
    return [job(n=n), replace(job(), prompts=pooled)]


def test_only_prompts_that_have_begun_are_counted() -> None:
    async def run() -> None:
        engine = FakeEngine()
        runtime = runtime_for(engine)
        generation = runtime.generation.start(replace(job(5, max_tokens=1000), max_prompts_at_once=2))
        steps = generation.steps()
        while sum(prompt.is_begun for prompt in generation.prompts) < 2:
            await anext(steps)
        await steps.aclose()
        assert len(engine.requests) == 2
        assert generation.usage().num_prompt_tokens == generation.num_sent_prompt_tokens == 4
        assert num_counted(runtime) == [4, 4]
        metrics = runtime.metrics.render()
        assert b'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 2' in metrics
        assert runtime.lifecycle.num_sequences == 0

    asyncio.run(run())


@pytest.mark.parametrize("asked", jobs_of_tokens_and_vectors(n=2))
def test_a_prompt_that_the_engine_refused_is_not_counted(asked: GenerationJob) -> None:
    async def run() -> None:
        runtime = runtime_for(FakeEngine(refuse_with="no such type", fail_code=EngineErrorCode.GRAMMAR))
        generation = runtime.generation.start(asked)
        with pytest.raises(ServingError):
            await collect(generation.steps())
        assert generation.num_sent_prompt_tokens == 2
        assert generation.usage().num_prompt_tokens == 0
        assert sum(num_counted(runtime)) == 0

    asyncio.run(run())


@pytest.mark.parametrize("asked", jobs_of_tokens_and_vectors())
def test_a_prompt_that_only_waited_is_not_counted(asked: GenerationJob) -> None:
    async def run() -> None:
        engine = FakeEngine(gate=asyncio.Event())
        runtime = runtime_for(engine)
        generation = runtime.generation.start(asked)
        await leave(generation.steps(), lambda: bool(engine.requests))
        assert generation.num_sent_prompt_tokens == 2
        assert generation.usage().num_prompt_tokens == 0
        assert sum(num_counted(runtime)) == 0

    asyncio.run(run())


@pytest.mark.parametrize("asked", jobs_of_tokens_and_vectors(n=2))
def test_a_prompt_abandoned_while_it_is_computed_is_counted(asked: GenerationJob) -> None:
    async def run() -> None:
        engine = FakeEngine(rest_of_prompts=asyncio.Event())
        runtime = runtime_for(engine)
        generation = runtime.generation.start(asked)
        await leave(generation.steps(), lambda: generation.prompts[0].is_begun)
        assert len(engine.aborted) == 1
        usage = generation.usage()
        assert (usage.num_prompt_tokens, usage.num_completion_tokens) == (2, 0)
        assert num_counted(runtime) == [2, 2]
        assert generation.times().ttft_ms is None

    asyncio.run(run())


@pytest.mark.parametrize("asked", jobs_of_tokens_and_vectors(n=2))
def test_a_prompt_is_counted_once_when_it_begins(asked: GenerationJob) -> None:
    async def run() -> None:
        told: list[None] = []
        rest = asyncio.Event()
        runtime = runtime_for(FakeEngine(rest_of_prompts=rest))
        generation = runtime.generation.start(replace(asked, on_first_token=lambda: told.append(None)))
        steps = generation.steps()
        first = asyncio.ensure_future(anext(steps))
        await until(lambda: generation.prompts[0].is_begun)
        assert (told, generation.times().ttft_ms) == ([], None)
        rest.set()
        deltas = [await first] + [step async for step in steps]
        assert all(delta.token_ids or delta.finish_reason for step in deltas for delta in step)
        assert generation.finished
        assert generation.usage().num_prompt_tokens == 2
        assert num_counted(runtime) == [2, 2]
        assert told == [None]

    asyncio.run(run())


def test_a_prompt_that_had_begun_is_counted_if_it_is_ended_from_outside() -> None:
    async def run() -> None:
        rest = asyncio.Event()
        runtime = runtime_for(FakeEngine(rest_of_prompts=rest))
        generation = runtime.generation.start(job())
        first = asyncio.ensure_future(anext(generation.steps()))
        await until(lambda: generation.prompts[0].is_begun)
        generation.end_with(ServingError(ErrorCode.INVALID_API_KEY, "revoked"))
        rest.set()
        with pytest.raises(ServingError, match="revoked"):
            await first
        assert generation.usage().num_prompt_tokens == 2
        assert num_counted(runtime) == [2, 2]

    asyncio.run(run())


def test_pooled_prompts_are_not_counted_in_metrics_of_text() -> None:
    async def run() -> None:
        runtime = runtime_for(FakeEngine())
        prompts = [Prompt([10, index], SamplingParams(1), pooling=PoolingParams(Pooling.LAST)) for index in range(3)]
        generation = runtime.generation.start(replace(job(), prompts=prompts, max_prompts_at_once=2))
        await collect(generation.steps())
        assert generation.finished
        assert all(prompt.vector for prompt in generation.prompts)
        assert generation.usage().num_prompt_tokens == 6
        metrics = runtime.metrics.render()
        for name, count in [
            ("request_params_max_tokens", 0),
            ("time_to_first_token_seconds", 0),
            ("e2e_request_latency_seconds", 3),
        ]:
            assert f'vllm:{name}_count{{engine="0",model_name="tiny"}} {count}.0'.encode() in metrics

    asyncio.run(run())


def test_a_generation_closed_before_its_first_step_never_reaches_the_engine() -> None:
    async def run() -> None:
        engine = FakeEngine()
        runtime = runtime_for(engine)
        runtime.generation.start(job()).close()
        assert runtime.lifecycle.num_sequences == 0
        assert not engine.requests

    asyncio.run(run())


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_engine_errors_and_death_are_raised_and_free_everything(num_prompts: int) -> None:
    async def run(engine: FakeEngine, code: ErrorCode) -> None:
        runtime = runtime_for(engine)
        with pytest.raises(ServingError) as caught:
            await collect(runtime.generation.start(job(num_prompts)).steps())
        assert caught.value.code is code
        assert runtime.lifecycle.num_sequences == 0
        assert b'finished_reason="error",model_name="tiny"} %d' % num_prompts in runtime.metrics.render()

    asyncio.run(run(FakeEngine(fail_with="something went wrong"), ErrorCode.ENGINE_ERROR))
    not_finite = FakeEngine(fail_with="the logits are not finite", fail_code=EngineErrorCode.NOT_FINITE)
    asyncio.run(run(not_finite, ErrorCode.NOT_FINITE))
    asyncio.run(run(FakeEngine(die_after=2), ErrorCode.ENGINE_DEAD))


def test_a_dead_engine_accepts_no_requests() -> None:
    async def run() -> None:
        engine = FakeEngine()
        runtime = runtime_for(engine)
        engine.error = "gone"
        with pytest.raises(ServingError) as caught:
            runtime.generation.start(job())
        assert caught.value.code is ErrorCode.ENGINE_DEAD
        assert "gone" not in caught.value.message
        assert runtime.lifecycle.num_sequences == 0

    asyncio.run(run())


def test_the_engine_gets_the_adapters_digest_the_tenant_and_a_fresh_id() -> None:
    async def run() -> None:
        engine = FakeEngine()
        runtime = runtime_for(engine)
        adapter = BoundAdapter("sql", "acme/sql", "d" * 64)
        for _ in range(2):
            asked = replace(job(2, adapter=adapter), cache_salt="salt", tenant="acme", tenant_weight=2.0)
            await collect(runtime.generation.start(asked).steps())
        await collect(runtime.generation.start(job()).steps())
        assert [request.adapter_digest for request in engine.requests] == ["d" * 64] * 4 + [None]
        assert [request.tenant for request in engine.requests] == ["acme"] * 4 + [""]
        assert {(request.cache_salt, request.tenant_weight) for request in engine.requests[:4]} == {("salt", 2.0)}
        assert len({request.request_id for request in engine.requests}) == 5

    asyncio.run(run())


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_ending_from_outside_gives_the_reader_the_reason_and_aborts_in_the_engine(num_prompts: int) -> None:
    async def run() -> None:
        engine = FakeEngine()
        runtime = runtime_for(engine)
        generation = runtime.generation.start(job(num_prompts, max_tokens=100))
        steps = generation.steps()
        await anext(steps)
        generation.end_with(ServingError(ErrorCode.INVALID_API_KEY, "revoked"))
        generation.end_with(ServingError(ErrorCode.FORBIDDEN, "too late"))
        with pytest.raises(ServingError) as caught:
            async for _ in steps:
                pass
        assert caught.value.message == "revoked"
        assert len(engine.aborted) == num_prompts
        assert runtime.lifecycle.num_sequences == 0
        assert (generation.finished, generation.finish_reason) == (False, FinishReason.ABORT)

    asyncio.run(run())


def test_a_generation_ended_before_it_began_never_reaches_the_engine() -> None:
    async def run() -> None:
        engine = FakeEngine()
        generation = runtime_for(engine).generation.start(job())
        generation.end_with(ServingError(ErrorCode.INVALID_API_KEY, "revoked"))
        with pytest.raises(ServingError):
            await anext(generation.steps())
        generation.close()
        assert not engine.requests

    asyncio.run(run())


def test_times_are_known_after_the_first_token_whose_callback_runs_once() -> None:
    async def run() -> None:
        told: list[None] = []
        engine = FakeEngine(step_s=0.001)
        asked = replace(job(n=2), received_s=time.monotonic(), on_first_token=lambda: told.append(None))
        generation = runtime_for(engine).generation.start(asked)
        assert generation.times().ttft_ms is None
        await collect(generation.steps())
        times = generation.times()
        assert told == [None]
        assert times.queue_ms == 1.0
        assert times.ttft_ms is not None
        assert times.generation_ms is not None
        assert 0 < times.ttft_ms < 10_000
        assert 0 < times.generation_ms < 10_000
        assert (generation.finished, generation.finish_reason) == (True, FinishReason.LENGTH)

    asyncio.run(run())

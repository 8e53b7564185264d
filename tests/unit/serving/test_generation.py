import asyncio
from pathlib import Path

import pytest

from loraserve.engine.request import EngineErrorCode, EngineStats, FinishReason, SamplingParams
from loraserve.serving.choice import TextOptions
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.generation import GenerationJob, Prompt, collect
from loraserve.serving.registry import ResolvedAdapter
from loraserve.serving.runtime import Runtime, build_runtime
from loraserve.serving.settings import Limits
from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import make_settings, register

TEXT = TextOptions(eos_token_ids=frozenset({1}))


def job(
    num_prompts: int = 1,
    adapter: ResolvedAdapter | None = None,
    text: TextOptions = TEXT,
    n: int = 1,
    max_tokens: int = 6,
) -> GenerationJob:
    prompts = [Prompt([10 + index, 11], SamplingParams(max_tokens, n=n)) for index in range(num_prompts)]
    return GenerationJob(prompts, adapter, text, received_s=0.0)


def runtime_for(engine: FakeEngine, **changes: object) -> Runtime:
    return build_runtime(engine, make_settings(Path("/nonexistent"), **changes))


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


def test_steps_are_joined_to_one_delta_per_choice() -> None:
    async def run() -> None:
        runtime = runtime_for(FakeEngine())
        generation = runtime.generation.start(job(3, n=2))
        async for deltas in generation.steps():
            keys = [(delta.prompt_index, delta.index) for delta in deltas]
            assert len(set(keys)) == len(keys)

    asyncio.run(run())


def test_a_stop_string_ends_its_choice_and_the_request_when_it_is_the_last() -> None:
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


def test_a_choice_that_stopped_is_aborted_while_its_siblings_run_on() -> None:
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


def test_what_the_engine_ended_by_itself_is_not_aborted() -> None:
    async def run() -> None:
        engine = FakeEngine(tokens_per_step=9)
        runtime = runtime_for(engine)
        aborts: list[str] = []
        engine.abort = lambda request_id, index=None: aborts.append(request_id)  # pyright: ignore[reportAttributeAccessIssue]
        text = TextOptions(eos_token_ids=frozenset({1}), stop=("never said",))
        await collect(runtime.generation.start(job(3, text=text, n=2)).steps())
        assert aborts == []

    asyncio.run(run())


def test_a_prompt_that_stopped_is_aborted_while_others_run_on() -> None:
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
def test_closing_aborts_what_runs_and_is_idempotent(num_prompts: int) -> None:
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


def test_closing_before_the_first_step_never_reaches_the_engine() -> None:
    async def run() -> None:
        engine = FakeEngine()
        runtime = runtime_for(engine)
        runtime.generation.start(job()).close()
        assert runtime.lifecycle.num_sequences == 0
        assert not engine.requests

    asyncio.run(run())


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_engine_errors_and_death_are_told_and_free_everything(num_prompts: int) -> None:
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


def test_admission() -> None:
    async def run() -> None:
        engine = FakeEngine()
        runtime = runtime_for(engine, limits=Limits(max_queued=3))
        engine.stats = EngineStats(num_waiting=3)
        with pytest.raises(ServingError, match="3 sequences are waiting") as caught:
            runtime.generation.start(job())
        assert caught.value.code is ErrorCode.QUEUE_FULL
        assert caught.value.retry_after_s

        engine.stats = EngineStats()  # The engine does not know yet of those that came in this instant.
        running = [runtime.generation.start(job(n=1)) for _ in range(engine.model.max_num_seqs + 3)]
        with pytest.raises(ServingError) as caught:
            runtime.generation.start(job())
        assert caught.value.code is ErrorCode.QUEUE_FULL
        running[0].close()
        running.append(runtime.generation.start(job()))
        for generation in running:
            generation.close()

        engine.error = "gone"
        with pytest.raises(ServingError) as caught:
            runtime.generation.start(job())
        assert caught.value.code is ErrorCode.ENGINE_DEAD
        assert "gone" not in caught.value.message
        assert runtime.lifecycle.num_sequences == 0

    asyncio.run(run())


def test_an_adapter_removed_before_the_engine_got_the_request_is_not_found() -> None:
    async def run() -> None:
        engine = FakeEngine()
        runtime = runtime_for(engine)
        register(runtime, "sql")
        adapter = runtime.registry.resolve("sql")
        assert adapter is not None
        generation = runtime.generation.start(job(adapter=adapter))
        runtime.registry.remove("sql")
        with pytest.raises(ServingError) as caught:
            await collect(generation.steps())
        generation.close()
        assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
        assert not engine.requests
        assert runtime.lifecycle.num_sequences == 0

    asyncio.run(run())


def test_the_engine_gets_the_adapters_digest_and_a_fresh_id() -> None:
    async def run() -> None:
        engine = FakeEngine()
        runtime = runtime_for(engine)
        register(runtime, "sql")
        for _ in range(2):
            await collect(runtime.generation.start(job(2, adapter=runtime.registry.resolve("sql"))).steps())
        await collect(runtime.generation.start(job()).steps())
        adapter = runtime.registry.resolve("sql")
        assert adapter is not None
        assert [request.adapter_digest for request in engine.requests] == [adapter.digest] * 4 + [None]
        assert len({request.request_id for request in engine.requests}) == 5

    asyncio.run(run())


def test_content_replaced_before_the_engine_has_the_request_gives_way_to_what_the_name_stands_for() -> None:
    """An adapter replaced in place between resolving a name and handing the request over is no reason to refuse it."""

    async def run() -> None:
        runtime = runtime_for(FakeEngine())
        old, new = ResolvedAdapter("guest", "a" * 64, 8, 1), ResolvedAdapter("guest", "b" * 64, 8, 1)
        await runtime.engine.load(new.digest, "packed")
        runtime.registry.add(old)
        generation = runtime.generation.start(job(2, adapter=old))
        runtime.registry.add(new)
        await collect(generation.steps())
        assert {prompt.engine_request.adapter_digest for prompt in generation.prompts} == {new.digest}
        gone = runtime.generation.start(job(adapter=old))
        runtime.registry.remove("guest")
        with pytest.raises(ServingError) as error:
            await collect(gone.steps())
        assert error.value.code is ErrorCode.MODEL_NOT_FOUND

    asyncio.run(run())

"""LocalEngine and the engine process's loop over a real process and socket; the model behind them is a fake."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import uvloop

from loraserve.engine.config import EngineConfig
from loraserve.engine.request import EngineErrorCode, EngineRequest, FinishReason, SamplingParams
from loraserve.serving.engine_client import AdapterLoadError, EngineDeadError
from loraserve.serving.process.local_engine import EngineStartFailedError, LocalEngine
from tests.support.small_sockets import MACOS_BYTES, buffer_sizes, small_pair

SUPPORT = Path(__file__).parents[1] / "support"
FAKE_ENGINE = (sys.executable, "-P", str(SUPPORT / "fake_engine.py"))
WAIT_S = 30.0
ENDLESS = 1 << 30

Progress = list[tuple[str, int, int]]


@asynccontextmanager
async def running_engine(model: str = "fake", progress: Progress | None = None) -> AsyncIterator[LocalEngine]:
    progress = [] if progress is None else progress
    engine = await LocalEngine.start(EngineConfig(model), lambda *step: progress.append(step), FAKE_ENGINE)
    try:
        yield engine
    finally:
        await engine.close(WAIT_S)


def run(
    test: Callable[[], Awaitable[None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await test()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(bounded())


def request(
    request_id: str = "r", *, max_tokens: int = 5, n: int = 1, prompt: list[int] | None = None
) -> EngineRequest:
    return EngineRequest(request_id, prompt or [1, 2, 3], SamplingParams(max_tokens=max_tokens, n=n))


async def tokens_of(engine: LocalEngine, asked: EngineRequest) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(asked.sampling.n)]
    async for outputs in engine.generate(asked):
        for output in outputs:
            tokens[output.index] += output.token_ids
    return tokens


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_the_engine_sockets_buffers_exceed_the_macos_default(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running_engine() as engine:
            assert engine._transport is not None
            assert min(buffer_sizes(engine._transport.get_extra_info("socket"))) > 2 * MACOS_BYTES

    monkeypatch.setattr(socket, "socketpair", small_pair)
    run(test)


def test_start_reports_progress_and_model() -> None:
    async def test() -> None:
        progress: Progress = []
        async with running_engine("some-model", progress) as engine:
            assert progress == [("weights", 1, 3), ("weights", 2, 3), ("weights", 3, 3)]
            assert engine.model.name == "some-model"
            assert engine.error is None

    run(test)


def test_choices_of_concurrent_requests_arrive_complete_and_in_order() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            asked = [request(f"r{i}", max_tokens=i + 1, n=i % 3 + 1) for i in range(20)]
            for one, tokens in zip(asked, await asyncio.gather(*(tokens_of(engine, a) for a in asked)), strict=True):
                assert tokens == [list(range(one.sampling.max_tokens))] * one.sampling.n

    run(test)


def test_a_prompt_is_reported_as_begun_once_even_if_its_consumer_leaves() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            begun: list[str] = []
            stream = engine.generate(request("r", max_tokens=ENDLESS), lambda prompt: begun.append(prompt.request_id))
            first = asyncio.ensure_future(anext(stream))
            await until(lambda: bool(begun))
            assert begun == ["r"]
            await first
            await stream.aclose()
            assert begun == ["r"]

    run(test)


def test_steps_are_joined_when_the_consumer_lags() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            stream = engine.generate(request(max_tokens=50))
            tokens = [token for output in await anext(stream) for token in output.token_ids]
            await until(lambda: engine.stats.num_running == 0)
            rest = [token for output in await anext(stream) for token in output.token_ids]
            assert tokens + rest == list(range(50))
            assert [outputs async for outputs in stream] == []

    run(test)


def test_closing_the_iterator_aborts() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            stream = engine.generate(request(max_tokens=ENDLESS))
            await anext(stream)
            await stream.aclose()
            await until(lambda: engine.stats.num_preemptions == 1)
            assert engine.stats.num_running == 0

    run(test)


def test_cancelling_the_consumer_aborts() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            consumer = asyncio.create_task(tokens_of(engine, request(max_tokens=ENDLESS)))
            await until(lambda: engine.stats.num_running == 1)
            consumer.cancel()
            await until(lambda: engine.stats.num_preemptions == 1)

    run(test)


def test_abort_right_after_the_add_ends_the_request_as_aborted() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            stream = engine.generate(request(max_tokens=ENDLESS, n=2))
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            engine.abort("r")
            engine.abort("r")
            outputs = await first + [output for more in [o async for o in stream] for output in more]
            assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.ABORT] * 2
            engine.abort("r")
            engine.abort("never seen")
            assert await tokens_of(engine, request()) == [[0, 1, 2, 3, 4]]

    run(test)


def test_aborting_one_choice_leaves_the_others() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            stream = engine.generate(request(max_tokens=2000, n=3))
            outputs = await anext(stream)
            engine.abort("r", 1)
            engine.abort("r", 1)
            engine.abort("r", 7)
            outputs += [output for more in [o async for o in stream] for output in more]
            reasons = {o.index: o.finish_reason for o in outputs if o.finish_reason}
            assert reasons == {0: FinishReason.LENGTH, 1: FinishReason.ABORT, 2: FinishReason.LENGTH}
            lengths = [sum(len(o.token_ids) for o in outputs if o.index == index) for index in range(3)]
            assert lengths[1] < lengths[0] == lengths[2] == 2000
            await until(lambda: engine.stats.num_running == 0)
            assert engine.stats.num_preemptions == 1

    run(test)


def test_refused_request_is_answered_for_every_choice() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            outputs = [
                o for outputs in [o async for o in engine.generate(request(max_tokens=-1, n=2))] for o in outputs
            ]
            assert [(o.index, o.finish_reason, o.error, o.error_code) for o in outputs] == [
                (0, FinishReason.ERROR, "max_tokens is negative", EngineErrorCode.INVALID_REQUEST),
                (1, FinishReason.ERROR, "max_tokens is negative", EngineErrorCode.INVALID_REQUEST),
            ]

    run(test)


def test_request_id_in_use_raises_value_error() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            stream = engine.generate(request(max_tokens=ENDLESS))
            await anext(stream)
            with pytest.raises(ValueError, match="in use"):
                await anext(engine.generate(request()))
            await stream.aclose()

    run(test)


def test_adapters_load_and_unload_and_a_refusal_gives_its_reason() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            await asyncio.gather(engine.load("d", "/packed"), engine.load("d", "/packed"), engine.load("e", "/packed"))
            await until(lambda: engine.stats.resident_adapters == ["d", "e"])
            await engine.unload("d")
            await until(lambda: engine.stats.resident_adapters == ["e"])
            with pytest.raises(AdapterLoadError, match="/bad does not fit"):
                await engine.load("f", "/bad")

    run(test)


def test_statistics_that_do_not_list_the_resident_adapters_leave_those_listed_last() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            await engine.load("d", "/packed")
            await until(lambda: engine.stats.resident_adapters == ["d"])
            # Most of them are sent because the engine has run out of work.
            for step in range(5):
                assert [output async for output in engine.generate(request(max_tokens=1))]
                assert engine.stats.step > step
                assert engine.stats.resident_adapters == ["d"]

    run(test)


def test_idle_engine_sends_heartbeats() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            before = engine.last_progress_s
            await until(lambda: engine.last_progress_s > before)

    run(test)


def test_the_longest_step_includes_the_time_the_engine_was_silent() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            await tokens_of(engine, request())
            before = engine.longest_step_s
            process = psutil.Process(engine.pid)
            stream = engine.generate(request("other", max_tokens=ENDLESS))
            await anext(stream)
            process.suspend()
            await asyncio.sleep(before + 0.5)
            process.resume()
            await until(lambda: engine.longest_step_s >= before + 0.4)
            await stream.aclose()

    run(test)


def test_killed_engine_fails_generate_load_and_everything_after() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            stream = engine.generate(request("other", max_tokens=ENDLESS))
            await anext(stream)
            with pytest.raises(EngineDeadError, match="signal 9"):
                await tokens_of(engine, request(prompt=[666]))
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
            await engine.wait_dead()
            assert engine.error == "the engine ended with signal 9 (out of memory?)"
            with pytest.raises(EngineDeadError):
                await anext(engine.generate(request()))
            with pytest.raises(EngineDeadError):
                await engine.load("d", "/packed")

    run(test)


def test_the_end_of_an_engine_is_noticed_even_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def test() -> None:
        async with running_engine() as engine:
            monkeypatch.setattr(threading.Thread, "start", refuse)
            os.kill(engine.pid, signal.SIGKILL)
            await engine.wait_dead()

    run(test)


def test_an_engine_that_hangs_at_exit_is_killed_and_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve.serving.process.local_engine.EXIT_WAIT_S", 0.1)
    hanging = (sys.executable, "-c", "import os, sys, time; os.close(int(sys.argv[1])); time.sleep(600)")

    async def test() -> None:
        with pytest.raises(EngineStartFailedError, match=r"did not exit within 0\.1 s and was killed"):
            await LocalEngine.start(EngineConfig("fake"), lambda *_: None, hanging)

    run(test)


def test_failing_step_reports_the_exception(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with running_engine() as engine:
            with pytest.raises(EngineDeadError, match="RuntimeError: a planted failure"):
                await tokens_of(engine, request(prompt=[667]))
            assert engine._process.returncode == 1

    run(test)
    assert "Traceback" in capfd.readouterr().err


def test_refused_start_gives_the_engines_message() -> None:
    async def test() -> None:
        with pytest.raises(EngineStartFailedError, match="the model is refused because of a reason"):
            async with running_engine("refused"):
                pass

    run(test)


def test_crash_at_start_gives_the_exit_code() -> None:
    async def test() -> None:
        with pytest.raises(EngineStartFailedError, match="exit code 3"):
            async with running_engine("crash"):
                pass

    run(test)


def test_cancelled_start_leaves_no_process() -> None:
    async def test() -> None:
        others = set(psutil.Process().children())  # servers of other tests
        started = asyncio.Event()
        start = asyncio.create_task(LocalEngine.start(EngineConfig("slow"), lambda *_: started.set(), FAKE_ENGINE))
        await started.wait()
        assert set(psutil.Process().children()) > others
        start.cancel()
        await asyncio.wait([start])
        assert start.cancelled()
        assert set(psutil.Process().children()) == others

    run(test)


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_start_cancelled_at_once_ends(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Also while the socket is connecting, when its transport is closed without notice."""

    async def test() -> None:
        for num_turns in range(6):
            start = asyncio.create_task(LocalEngine.start(EngineConfig("slow"), lambda *_: None, FAKE_ENGINE))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            start.cancel()
            await asyncio.wait([start])
            assert start.cancelled()

    run(test, loop_factory)


def test_close_ends_running_requests_as_aborted() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            stream = engine.generate(request(max_tokens=ENDLESS))
            await anext(stream)
            await engine.close(WAIT_S)
            outputs = [output for outputs in [o async for o in stream] for output in outputs]
            assert outputs[-1].finish_reason == FinishReason.ABORT
            assert engine._process.returncode == 0

    run(test)


def test_terminal_signals_do_not_stop_the_engine() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            os.kill(engine.pid, signal.SIGINT)
            os.kill(engine.pid, signal.SIGTERM)
            assert await tokens_of(engine, request()) == [[0, 1, 2, 3, 4]]

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="a process's environment is read from /proc")
def test_engine_asks_for_huge_pages() -> None:
    async def test() -> None:
        async with running_engine() as engine:
            environment = Path(f"/proc/{engine.pid}/environ").read_bytes().split(b"\0")
            assert any(b"glibc.malloc.hugetlb=" in variable for variable in environment)

    run(test)


@pytest.mark.parametrize("how", ["kill", "close_socket"])
def test_engine_ends_with_its_parent(how: str) -> None:
    parent = [sys.executable, "-P", str(SUPPORT / "engine_parent.py"), how, *FAKE_ENGINE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(parent, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        engine = psutil.Process(int(process.stdout.readline()))
        if how == "kill":
            process.kill()
        engine.wait(WAIT_S)

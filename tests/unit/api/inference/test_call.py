import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from enum import StrEnum, auto
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from litestar import Request

from loraserve.api.http.auth import STATE_KEY as PRINCIPAL_KEY
from loraserve.api.http.processing_time import STATE_KEY as RECEIVED_KEY
from loraserve.api.inference.call import InferenceCall, salted
from loraserve.api.inference.common_fields import CommonFields
from loraserve.control.requests.endings import used_tokens
from loraserve.control.requests.running import Demand, RouteInfo
from loraserve.control.tenancy.principal import Principal, server_principal
from loraserve.control.usage.outcome import Outcome
from loraserve.engine.request import SamplingParams
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.generation import Generation, Prompt, collect
from loraserve.serving.text.choice import TextOptions
from loraserve.store.records import DEFAULT_TENANT, SHARED_TENANT
from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import LiveServer, live_server, make_settings

SALTS = st.tuples(st.text(max_size=8), st.text(max_size=8))
BEFORE_S = 60.0


@given(SALTS, SALTS)
def test_different_pairs_of_salts_give_different_salts(first: tuple[str, str], second: tuple[str, str]) -> None:
    assert (salted(*first) == salted(*second)) == (first == second)


def request_of(principal: Principal, received_s: float) -> Any:
    return Request({"type": "http", "headers": [], "state": {PRINCIPAL_KEY: principal, RECEIVED_KEY: received_s}})


async def end_at_once(live: LiveServer, received_s: float) -> None:
    request = request_of(server_principal(DEFAULT_TENANT, "open"), received_s)
    target = await live.context.calls.resolve(request, "tiny")
    async with live.context.calls.admit(request, target, Demand(1, 1, RouteInfo())) as call:
        call.close()
    await live.context.calls.wait_settled()


def test_a_requests_duration_is_measured_from_its_arrival_not_from_its_admission(tmp_path: Path) -> None:
    """Like its TTFT, which could otherwise exceed the duration."""
    with live_server(FakeEngine(), make_settings(tmp_path)) as live:
        live.run(end_at_once(live, time.monotonic() - BEFORE_S))
        (record,) = httpx.get(f"{live.url}/v1/requests").json()["data"]
    assert record["duration_ms"] >= BEFORE_S * 1000
    assert record["at"] <= time.time() - BEFORE_S


def asked_for(live: LiveServer, label: str) -> float | None:
    """The prompt tokens that /metrics reports for the label; None if it has no series."""
    rows = [line for line in live.runtime.metrics.render().decode().splitlines() if f'adapter="{label}"' in line]
    found = [line for line in rows if line.startswith("loraserve_prompt_tokens_total")]
    assert bool(found) == bool(rows)
    return float(found[0].split()[-1]) if found else None


async def use_while_deleted(live: LiveServer, *, starts_before: bool, restore: bool) -> None:
    """Runs one request, admitted before the deletion, until it finishes."""
    principal, adapters = server_principal(SHARED_TENANT, "open"), live.control.adapters
    request, demand = request_of(principal, time.monotonic()), Demand(1, 1, RouteInfo())
    target = await live.context.calls.resolve(request, "sql")
    assert target.adapter is not None
    start: Any = ([Prompt([10, 11], SamplingParams(2))], TextOptions(frozenset({1})), CommonFields())
    async with live.context.calls.admit(request, target, demand) as call:
        generation = await call.start(*start) if starts_before else None
        deleting = asyncio.create_task(adapters.delete(principal, "", "sql"))
        while live.control.residency.is_wanted(target.adapter.digest):
            await asyncio.sleep(0.002)
        generation = generation or await call.start(*start)
        if restore:
            await adapters.restore(principal, "", "sql")
        assert await collect(generation.steps())
        call.close()
    await deleting
    await live.context.calls.wait_settled()


@pytest.mark.parametrize("starts_before", [True, False])
def test_a_request_that_outlives_its_adapter_leaves_no_series(tmp_path: Path, starts_before: bool) -> None:
    with live_server(FakeEngine(), make_settings(tmp_path), ("sql",)) as live:
        live.run(use_while_deleted(live, starts_before=starts_before, restore=False))
        assert asked_for(live, "sql") is None


def test_the_series_of_a_restored_adapter_are_kept(tmp_path: Path) -> None:
    with live_server(FakeEngine(), make_settings(tmp_path), ("sql",)) as live:
        live.run(use_while_deleted(live, starts_before=True, restore=True))
        assert asked_for(live, "sql") == 2


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Way(StrEnum):
    ENDS = auto()
    IS_REFUSED = auto()
    IS_ENDED_FROM_OUTSIDE = auto()


async def end_and_let_go(live: LiveServer, way: Way) -> weakref.ref[InferenceCall]:
    request = request_of(server_principal(DEFAULT_TENANT, "open"), time.monotonic())
    target, demand = await live.context.calls.resolve(request, "tiny"), Demand(1, 1, RouteInfo())
    ended: list[weakref.ref[InferenceCall]] = []
    with contextlib.suppress(ServingError):
        async with live.context.calls.admit(request, target, demand) as call:
            ended.append(weakref.ref(call))
            if way is Way.IS_REFUSED:
                raise ServingError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "")
            generation = await call.start(
                [Prompt([10, 11], SamplingParams(2))], TextOptions(frozenset({1})), CommonFields()
            )
            if way is Way.IS_ENDED_FROM_OUTSIDE:
                call.admitted.running.abort(ServingError(ErrorCode.REQUEST_ABORTED, ""))
            assert await collect(generation.steps())
            call.close()
    await live.context.calls.wait_settled()
    return ended[0]


@pytest.mark.parametrize("way", Way)
def test_an_ended_call_is_freed_without_the_garbage_collector(tmp_path: Path, way: Way) -> None:
    """The collector runs rarely, and prompts are large."""
    with live_server(FakeEngine(), make_settings(tmp_path)) as live, gc_disabled():
        call = live.run(end_and_let_go(live, way))
        assert call() is None


async def leave_or_be_refused(live: LiveServer, is_sent: Callable[[Generation], bool]) -> Outcome:
    request = request_of(server_principal(DEFAULT_TENANT, "open"), time.monotonic())
    target, demand = await live.context.calls.resolve(request, "tiny"), Demand(1, 1, RouteInfo())
    with contextlib.suppress(ServingError, asyncio.CancelledError):
        async with live.context.calls.admit(request, target, demand) as call:
            generation = await call.start(
                [Prompt([10, 11], SamplingParams(2))], TextOptions(frozenset({1})), CommonFields()
            )
            answer = asyncio.ensure_future(collect(generation.steps()))
            while not answer.done() and not is_sent(generation):
                await asyncio.sleep(0)
            assert call.progress().num_prompt_tokens == 2, "the live view shows what was sent"
            answer.cancel()
            await answer
    await live.context.calls.wait_settled()
    assert call.outcome is not None
    return call.outcome


@pytest.mark.parametrize(
    ("engine", "num_charged"),
    [
        (FakeEngine(refuse_with="no such type"), 0),
        (FakeEngine(gate=asyncio.Event()), 0),
        (FakeEngine(rest_of_prompts=asyncio.Event()), 2),
    ],
    ids=["refused", "waited", "left while it was computed"],
)
def test_a_prompt_is_charged_once_it_has_begun(tmp_path: Path, engine: FakeEngine, num_charged: int) -> None:
    def is_sent(generation: Generation) -> bool:
        return generation.prompts[0].is_begun if engine.rest_of_prompts else bool(engine.requests)

    with live_server(engine, make_settings(tmp_path)) as live:
        outcome = live.run(leave_or_be_refused(live, is_sent))
        assert outcome.num_prompt_tokens == used_tokens(outcome) == num_charged
        report = httpx.get(f"{live.url}/v1/usage").json()
    assert [row["num_prompt_tokens"] for row in report["data"]] == [num_charged]


@pytest.mark.parametrize(("stream", "charged"), [(False, (0, 0)), (True, (2, 3))])
def test_an_answer_left_undelivered_by_a_server_fault_is_not_charged(
    tmp_path: Path, stream: bool, charged: tuple[int, int]
) -> None:
    with live_server(FakeEngine(die_after=3), make_settings(tmp_path)) as live:
        asked = {"model": "tiny", "prompt": [10, 11], "max_tokens": 9, "stream": stream}
        answer = httpx.post(f"{live.url}/v1/completions", json=asked)
        assert (answer.status_code, "engine_dead" in answer.text) == (200 if stream else 503, True)
        (row,) = httpx.get(f"{live.url}/v1/usage").json()["data"]
    assert (row["num_prompt_tokens"], row["num_output_tokens"]) == charged

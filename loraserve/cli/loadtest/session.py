"""Runs one load test from start to report: find the server's models, warm up, measure, print."""

import asyncio
import signal
from dataclasses import asdict, replace
from pathlib import Path

import aiohttp
import msgspec
import rich_click as click
import uvloop
from rich.console import Console

from loraserve.cli.async_http_client import async_http_client, without_user
from loraserve.cli.interruption import SIGNAL_STATUS
from loraserve.cli.loadtest.client import RequestResult, RequestStyle
from loraserve.cli.loadtest.plan import PlannedRequest, Workload, plan
from loraserve.cli.loadtest.plot import plot
from loraserve.cli.loadtest.recorded import RecordedRequest, read_recorded, replay
from loraserve.cli.loadtest.report import Report, report
from loraserve.cli.loadtest.runner import BenchRun, run
from loraserve.cli.loadtest.settings import BenchSettings
from loraserve.cli.loadtest.tables import print_report
from loraserve.cli.loadtest.target import Target, find_target, wanted_models
from loraserve.cli.request_progress import request_progress
from loraserve.cli.serve.open_files import raise_soft_limit

NOT_IN_REPORT = ("api_key", "json_file", "plot_file")


def run_session(settings: BenchSettings) -> int:
    """Returns the exit code."""
    raise_soft_limit()
    try:
        return _measure_and_report(settings)
    except KeyboardInterrupt:
        return SIGNAL_STATUS + signal.SIGINT


def _measure_and_report(settings: BenchSettings) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured, found = runner.run(_session(settings))
    if settings.json_file:
        settings.json_file.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    if settings.plot_file:
        settings.plot_file.write_text(plot(measured.results, cold=settings.cold))
    print_report(Console(), found)
    if measured.interrupted_by is not None:
        return SIGNAL_STATUS + measured.interrupted_by
    return 1 if found.errors else 0


async def _session(settings: BenchSettings) -> tuple[BenchRun, Report]:
    recorded = _recorded(settings)
    url = without_user(settings.url)
    async with async_http_client(settings.url, settings.api_key) as client:
        target = await find_target(client, url, settings.server_kind)
        settings = _fitted(settings, target)
        models = sorted({request.model for request in recorded}) or wanted_models(
            target, settings.adapters, settings.num_adapters
        )
        measured = await _measure(client, settings, target, models, recorded)
    shown = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(settings).items()
        if name not in NOT_IN_REPORT
    }
    found = {**shown, "url": url, "server": target.kind.value, "models": models}
    return measured, report(measured, found, cold=settings.cold)


def _recorded(settings: BenchSettings) -> list[RecordedRequest]:
    if settings.requests_file is None:
        return []
    try:
        recorded = read_recorded(settings.requests_file)
    except msgspec.DecodeError as error:
        raise click.ClickException(f"{settings.requests_file}: {error}") from error
    if not recorded:
        raise click.ClickException(f"{settings.requests_file} contains no requests")
    return recorded


def _fitted(settings: BenchSettings, target: Target) -> BenchSettings:
    """Adapts the settings to the server's abilities, and prints a note for each that it lacks."""
    notes = Console(stderr=True)
    if settings.ignore_eos and not target.kind.can_ignore_eos:
        notes.print("this server is not known to support ignore_eos: outputs may be shorter than requested")
    if target.kind.takes_token_ids or settings.text or settings.chat:
        return settings
    if settings.requests_file:
        raise click.ClickException(f"--requests contains token ids, which {target.kind} does not accept")
    notes.print(f"{target.kind} does not accept token ids: prompts are words")
    return replace(settings, text=True)


async def _measure(
    client: aiohttp.ClientSession,
    settings: BenchSettings,
    target: Target,
    models: list[str],
    recorded: list[RecordedRequest],
) -> BenchRun:
    style = RequestStyle(target.kind, settings.chat, settings.ignore_eos, settings.temperature)
    workload = settings.workload(models)
    warm_up = _warm_up(settings, target, workload)
    with request_progress() as bars:

        async def send_all(name: str, requests: list[PlannedRequest], at_once: int | None) -> BenchRun:
            bar = bars.add_task(name, total=len(requests), failed="")
            num_failed = 0

            def on_result(result: RequestResult) -> None:
                nonlocal num_failed
                num_failed += result.failure is not None
                bars.update(bar, advance=1, failed=f"{num_failed} failed" if num_failed else "")

            return await run(client, style, requests, at_once, on_result)

        warmed_up = await send_all("warm-up", warm_up, settings.running_at_once or 1)
        if warmed_up.interrupted_by is not None:
            return replace(warmed_up, results=[])
        requests = replay(recorded, workload) if recorded else plan(workload)
        return await send_all("requests", requests, settings.running_at_once)


def _warm_up(settings: BenchSettings, target: Target, workload: Workload) -> list[PlannedRequest]:
    """Prompts differ from the measured ones, so that none of those is cached; a cold test uses none of its adapters."""
    if settings.cold:
        base = target.base if target.base not in workload.models else None
        count = settings.warm_up if settings.warm_up is not None else int(base is not None)
        if count and base is None:
            raise click.ClickException(
                "--cold needs a base model that is not measured for its warm-up, and there is none: add --warm-up 0"
            )
        workload = replace(workload, models=[base or ""])
    else:
        count = len(workload.models) if settings.warm_up is None else settings.warm_up
    return plan(replace(workload, num_requests=count, request_rate=None, seed=-1 - workload.seed))

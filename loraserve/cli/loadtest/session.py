"""One load test from start to report: find the models, warm up, measure, print."""

import asyncio
from dataclasses import asdict, replace

import httpx
import msgspec
import rich_click as click
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loraserve.cli.loadtest.client import RequestStyle
from loraserve.cli.loadtest.plan import PlannedRequest, RecordedRequest, Workload, plan, read_recorded, replay
from loraserve.cli.loadtest.report import Report, print_report, report
from loraserve.cli.loadtest.runner import BenchRun, http_client, run
from loraserve.cli.loadtest.settings import BenchSettings

REFRESH_PER_S = 2
"""Of the progress bar: the generator leaves the cores to the server."""


def run_session(settings: BenchSettings) -> int:
    """Returns the exit code."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(_session(settings))
    print_report(Console(), found)
    if settings.json_file:
        settings.json_file.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 1 if found.errors else 0


async def _session(settings: BenchSettings) -> Report:
    async with http_client(settings.url, settings.api_key) as client:
        recorded = _recorded(settings)
        models = sorted({request.model for request in recorded}) or await _models(client, settings.adapters)
        measured = await _measure(client, settings, models, recorded)
    shown = {name: value for name, value in asdict(settings).items() if name not in ("api_key", "json_file")}
    shown["requests_file"] = str(settings.requests_file) if settings.requests_file else None
    return report(measured, {**shown, "models": models})


def _recorded(settings: BenchSettings) -> list[RecordedRequest]:
    if settings.requests_file is None:
        return []
    try:
        recorded = read_recorded(settings.requests_file)
    except msgspec.DecodeError as error:
        raise click.ClickException(f"{settings.requests_file}: {error}") from error
    if not recorded:
        raise click.ClickException(f"{settings.requests_file} holds no request")
    return recorded


async def _measure(
    client: httpx.AsyncClient, settings: BenchSettings, models: list[str], recorded: list[RecordedRequest]
) -> BenchRun:
    style = RequestStyle(settings.chat, settings.ignore_eos, settings.temperature)
    workload = settings.workload(models)
    with _progress() as bars:

        async def send_all(name: str, requests: list[PlannedRequest], at_once: int | None) -> BenchRun:
            bar = bars.add_task(name, total=len(requests))
            return await run(client, style, requests, at_once, lambda _: bars.advance(bar))

        await send_all("warm-up", _warm_up(settings, workload), settings.running_at_once or 1)
        requests = replay(recorded, workload) if recorded else plan(workload)
        return await send_all("requests", requests, settings.running_at_once)


def _warm_up(settings: BenchSettings, workload: Workload) -> list[PlannedRequest]:
    """Other prompts than the measured ones, so that no prefix is found."""
    count = len(workload.models) if settings.warm_up is None else settings.warm_up
    return plan(replace(workload, num_requests=count, request_rate=None, seed=-1 - workload.seed))


async def _models(client: httpx.AsyncClient, adapters: str) -> list[str]:
    """Names to ask for. The base is the model without a parent; without adapters it is all there is."""
    if adapters not in ("all", "base"):
        return [name.strip() for name in adapters.split(",") if name.strip()]
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise click.ClickException(f"{client.base_url} does not list its models: {error}") from error
    cards = response.json()["data"]
    base = [card["id"] for card in cards if not card.get("parent")][:1]
    with_parent = [card["id"] for card in cards if card.get("parent")]
    return base if adapters == "base" else with_parent or base


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), refresh_per_second=REFRESH_PER_S)

"""One batch from start to end: check the requests, send those without an answer, write what comes."""

import asyncio
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import rich_click as click
import uvloop

from loraserve.cli.async_http_client import async_http_client, fetch, without_user
from loraserve.cli.batches.answers_file import AnswersFile, open_answers
from loraserve.cli.batches.batch_requests import RequestsFile, check_requests
from loraserve.cli.batches.sender import Sender
from loraserve.cli.interruption import SIGNAL_STATUS, ended_by_signals
from loraserve.cli.request_progress import request_progress
from loraserve.cli.serve.open_files import raise_soft_limit


@dataclass(frozen=True, slots=True)
class BatchSettings:
    requests_file: Path
    answers_file: Path
    model: str | None
    resume: bool
    concurrency: int
    retry_for_s: float
    timeout_s: float
    url: str
    api_key: str | None
    tenant: str | None


@dataclass(slots=True)
class _Outcome:
    num_answered: int
    failures: Counter[str]
    interrupted_by: signal.Signals | None = None


def run_batch(settings: BatchSettings) -> int:
    """Returns the exit code. Raises `click.ClickException` before anything is sent, or if answers cannot be written."""
    raise_soft_limit()
    requests = check_requests(settings.requests_file)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome = runner.run(_send(settings, requests))
    except KeyboardInterrupt:
        return SIGNAL_STATUS + signal.SIGINT
    return _report(outcome, len(requests.custom_ids))


async def _send(settings: BatchSettings, requests: RequestsFile) -> _Outcome:
    headers = {} if settings.tenant is None else {"x-tenant": settings.tenant}
    async with async_http_client(
        settings.url, settings.api_key, headers=headers, timeout_s=settings.timeout_s
    ) as client:
        await fetch(client, without_user(settings.url), "v1/models")  # raises if nobody is there, or the key is wrong
        sender = Sender(client, settings.model, settings.retry_for_s)
        with open_answers(settings.answers_file, requests.custom_ids, resume=settings.resume) as answers:
            return await _send_waiting(sender, settings.concurrency, requests, answers)


async def _send_waiting(sender: Sender, concurrency: int, requests: RequestsFile, answers: AnswersFile) -> _Outcome:
    """Those that no earlier run has answered."""
    outcome = _Outcome(len(answers.answered), Counter())
    waiting = (request for request in requests.requests() if request.custom_id not in answers.answered)
    with request_progress() as bars:
        bar = bars.add_task("requests", total=len(requests.custom_ids), completed=outcome.num_answered, failed="")

        async def keep_sending() -> None:
            for request in waiting:
                answer = await sender.answer_to(request)
                answers.add(answer)
                if answer.failure is None:
                    outcome.num_answered += 1
                else:
                    outcome.failures[answer.failure.code] += 1
                num_failed = outcome.failures.total()
                bars.update(bar, advance=1, failed=f"{num_failed} failed" if num_failed else "")

        with ended_by_signals() as interruption:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(concurrency, len(requests.custom_ids))):
                        group.create_task(keep_sending())
            except* click.ClickException as errors:
                raise errors.exceptions[0] from None
    outcome.interrupted_by = interruption.by
    return outcome


def _report(outcome: _Outcome, num_requests: int) -> int:
    num_failed = outcome.failures.total()
    codes = ", ".join(f"{count:,} {code}" for code, count in outcome.failures.most_common())
    told = f"{outcome.num_answered:,} of {num_requests:,} answered"
    told += f", {num_failed:,} failed ({codes})" if num_failed else ""
    if outcome.num_answered < num_requests:
        told += "; --resume sends what is left"
    click.echo(told, err=True)
    if outcome.interrupted_by is not None:
        return SIGNAL_STATUS + outcome.interrupted_by
    return 1 if num_failed else 0

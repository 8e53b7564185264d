"""Runs one batch: checks the requests, sends those without an answer, writes the answers."""

import asyncio
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import rich_click as click
import uvloop

from loraserve.cli.async_http_client import async_http_client, fetch, without_user
from loraserve.cli.batches.answers_file import AnswersFile, open_answers
from loraserve.cli.batches.batch_answer import BatchAnswer
from loraserve.cli.batches.batch_requests import RequestsFile, check_requests
from loraserve.cli.batches.dispatch import Dispatch
from loraserve.cli.batches.sender import Sender
from loraserve.cli.failure import Failure
from loraserve.cli.interruption import SIGNAL_STATUS, ended_by_signals
from loraserve.cli.request_progress import request_progress
from loraserve.cli.serve.open_files import raise_soft_limit


@dataclass(frozen=True, slots=True)
class BatchSettings:
    requests_file: Path
    answers_file: Path
    model: str | None
    priority: int | None
    resume: bool
    concurrency: int
    retry_for_s: float
    timeout_s: float
    url: str
    api_key: str | None
    tenant: str | None

    @property
    def fields(self) -> dict[str, object]:
        """Fields of every request that replace its own."""
        given = {"model": self.model, "priority": self.priority}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(slots=True)
class _Outcome:
    num_requests: int
    num_answered: int
    failures: Counter[str] = field(default_factory=Counter[str])
    stopped_by: Failure | None = None
    interrupted_by: signal.Signals | None = None

    @property
    def num_left(self) -> int:
        """Requests without an answer or a failure."""
        return self.num_requests - self.num_answered - self.failures.total()


def run_batch(settings: BatchSettings) -> int:
    """Returns the exit code. Raises `click.ClickException` if the requests or the server cannot be used, before any
    request is sent, or if answers cannot be written."""
    raise_soft_limit()
    try:
        requests = check_requests(settings.requests_file)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome = runner.run(_send(settings, requests))
    except KeyboardInterrupt:
        return SIGNAL_STATUS + signal.SIGINT
    click.echo(_summary(outcome), err=True)
    if outcome.interrupted_by is not None:
        return SIGNAL_STATUS + outcome.interrupted_by
    return 0 if outcome.num_answered == outcome.num_requests else 1


async def _send(settings: BatchSettings, requests: RequestsFile) -> _Outcome:
    headers = {} if settings.tenant is None else {"x-tenant": settings.tenant}
    async with async_http_client(settings.url, settings.api_key, headers) as client:
        await fetch(client, without_user(settings.url), "v1/models")  # raises if no server answers or the key is wrong
        sender = Sender(client, settings.fields, settings.timeout_s)
        with open_answers(settings.answers_file, requests.custom_ids, resume=settings.resume) as answers:
            return await _send_waiting(sender, settings, requests, answers)


async def _send_waiting(
    sender: Sender, settings: BatchSettings, requests: RequestsFile, answers: AnswersFile
) -> _Outcome:
    """Sends the requests that no earlier run has answered."""
    outcome = _Outcome(len(requests.custom_ids), len(answers.answered))
    with request_progress() as bars:
        bar = bars.add_task("requests", total=outcome.num_requests, completed=outcome.num_answered, failed="")

        def keep(answer: BatchAnswer) -> None:
            answers.add(answer)
            if answer.failure is None:
                outcome.num_answered += 1
            else:
                outcome.failures[answer.failure.code] += 1
            num_failed = outcome.failures.total()
            bars.update(bar, advance=1, failed=f"{num_failed:,} failed" if num_failed else "")

        dispatch = Dispatch(
            sender.send,
            (request for request in requests.requests() if request.custom_id not in answers.answered),
            keep,
            concurrency=min(settings.concurrency, outcome.num_requests),
            retry_for_s=settings.retry_for_s,
        )
        with ended_by_signals() as interruption:
            failure = None
            try:
                await dispatch.run()
            except* click.ClickException as errors:
                failure = errors.exceptions[0]
            if failure is not None:  # outside the clause, in which Python 3.11.3 would wrap it again
                raise failure
    outcome.stopped_by = dispatch.stopped_by.failure if dispatch.stopped_by else None
    outcome.interrupted_by = interruption.by
    return outcome


def _summary(outcome: _Outcome) -> str:
    text = f"{outcome.num_answered:,} of {outcome.num_requests:,} answered"
    if num_failed := outcome.failures.total():
        text += f", {num_failed:,} failed ({', '.join(f'{n:,} {code}' for code, n in outcome.failures.most_common())})"
    if outcome.stopped_by is not None and outcome.num_left:
        text += f"; stopped, because the remaining requests would fail the same way ({outcome.stopped_by.message})"
    elif outcome.num_left and outcome.interrupted_by is None:
        text += "; the requests file has changed during the run"
    if outcome.num_answered < outcome.num_requests:
        text += "; --resume sends the rest" if outcome.num_left else "; --resume sends the failed ones again"
    return text

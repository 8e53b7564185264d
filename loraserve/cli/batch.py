"""`loraserve batch`: the options. The work is done in `batches/`."""

import sys
from pathlib import Path
from typing import Any

import rich_click as click

from loraserve.cli.number_range import NumberRange


@click.command(context_settings={"show_default": True})
@click.argument("requests_file", metavar="REQUESTS", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("answers_file", metavar="ANSWERS", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", help="Use this model for all requests: an adapter, NAME@ALIAS, or the base model.")
@click.option(
    "--priority",
    type=click.IntRange(-(2**31), 2**31 - 1),
    help="Use this priority for all requests: lower ones go first. Requests without one have 0.",
)
@click.option("--resume", is_flag=True, help="Continue ANSWERS: send the requests whose custom_id has no 200 there.")
@click.option("--concurrency", type=click.IntRange(1), default=16, help="Requests to keep running.")
@click.option(
    "--retry-for",
    "retry_for_s",
    metavar="SECONDS",
    type=NumberRange(0),
    default=300.0,
    help="How long to retry a request while the server is unreachable or refuses it because of a limit.",
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=NumberRange(0, min_open=True),
    default=600.0,
    help="Time limit for one answer, from sending its request.",
)
@click.option("--url", default="http://127.0.0.1:8000", envvar="LORASERVE_URL", help="Server address.")
@click.option("--api-key", envvar=["LORASERVE_API_KEY", "OPENAI_API_KEY"], help="Sent as a bearer token.")
@click.option("--tenant", envvar="LORASERVE_TENANT", help="Act for this tenant; needs a key for all tenants ('*').")
def batch(**options: Any) -> None:
    """Send a file of requests to a running server, ours or another with OpenAI's API, and write the answers to a file.

    Both files have the format of OpenAI's Batch API. ANSWERS gets a line for each answer, in the order in which they
    arrive. All requests are checked before the first is sent. Exits with 0 if all are answered. After Ctrl-C or a
    failure, ANSWERS keeps the answers so far, and --resume continues.
    """
    from loraserve.cli.batches.run_batch import BatchSettings, run_batch

    sys.exit(run_batch(BatchSettings(**options)))

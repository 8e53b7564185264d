"""`loraserve bench`: the options. The load test itself is in `loadtest/`."""

import sys
from pathlib import Path
from typing import Any

import rich_click as click

from loraserve.cli.loadtest.plan import Distribution
from loraserve.cli.loadtest.settings import BenchSettings


@click.command(context_settings={"show_default": True})
@click.option("--url", default="http://127.0.0.1:8000", envvar="LORASERVE_URL", help="Server, without /v1.")
@click.option("--api-key", envvar=["LORASERVE_API_KEY", "OPENAI_API_KEY"], help="Sent as a bearer token.")
@click.option("--adapters", default="all", help="Models to ask, a,b,c; or all adapters; or base.")
@click.option("--distribution", type=click.Choice([name.value for name in Distribution]), default="round-robin")
@click.option("--zipf-s", type=click.FloatRange(0), default=1.0, help="Skew of --distribution zipf.")
@click.option("--num-requests", type=click.IntRange(1), default=100)
@click.option("--concurrency", type=click.IntRange(1), help="Closed loop: requests kept running. [default: 16]")
@click.option("--request-rate", type=click.FloatRange(0, min_open=True), help="Open loop: requests per second.")
@click.option("--burstiness", type=click.FloatRange(0, min_open=True), default=1.0, help="1 = Poisson, < 1 = bursts.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, help="Mean prompt length.")
@click.option("--prompt-spread", type=click.IntRange(0), default=0, help="Lengths are uniform in mean ± spread.")
@click.option("--output-tokens", type=click.IntRange(1), default=64, help="Mean output length.")
@click.option("--output-spread", type=click.IntRange(0), default=0, help="Lengths are uniform in mean ± spread.")
@click.option("--text", is_flag=True, help="Prompts of words, about one per token, instead of token ids.")
@click.option("--chat", is_flag=True, help="Use /v1/chat/completions; implies --text.")
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="Generate exactly the output length.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0)
@click.option("--warm-up", type=click.IntRange(0), help="Requests before measuring. [default: one per model]")
@click.option("--seed", type=int, default=0, help="Of adapters, lengths, prompts and times.")
@click.option(
    "--requests",
    "requests_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines of model, prompt_token_ids and num_output_tokens to send, in place of drawn requests.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here.")
def bench(**options: Any) -> None:
    """Measure a running server: TTFT, inter-token latency and throughput, per adapter and in total.

    Keeps --concurrency requests running, or sends --request-rate requests a second whatever the server does.
    Exits with 1 if a request failed or got another number of tokens than it asked for.
    """
    if options["concurrency"] and options["request_rate"]:
        raise click.UsageError("--concurrency is a closed loop, --request-rate an open one: choose one")
    if options["requests_file"] and (options["text"] or options["chat"]):
        raise click.UsageError("--requests holds token ids, which --text and --chat exclude")
    settings = BenchSettings(**options)
    from loraserve.cli.loadtest.session import run_session

    sys.exit(run_session(settings))
